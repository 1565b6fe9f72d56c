#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/fd.h"
#include "core/process.h"

namespace torchtp::shm {

// Who of the group still lives. Every rank holds a record lock on its own byte of the segment's file: the kernel drops
// it when the process ends, however it ends. A forked child (a data loader's worker) does not hold its parent's lock,
// so it cannot hide the parent's death as an inherited socket or pipe would. Locks work across pid namespaces.
//
// Record locks of a process vanish when it closes ANY descriptor of the file: only Segment may hold one.
class Liveness {
 public:
  // Ranks that are threads of one process have the same identity.
  Liveness(const Fd& file, int rank, const std::vector<std::string>& identities);

  // Call when all ranks hold their locks: whose lock cannot be seen even now is not watched (deadlines still hold).
  // False if there are such ranks: then they must prove that they were alive.
  bool watch();
  bool is_dead(int rank) const;
  // What the kernel shows of the process that holds the rank's lock: nothing for ranks of this process and for those of
  // a pid namespace that cannot be seen from here.
  std::optional<Process> process(int rank) const;

 private:
  bool is_locked(int rank) const;

  const Fd& file_;  // the segment outlives this
  const int num_ranks_;
  uint64_t watched_ = 0;
};

}  // namespace torchtp::shm
