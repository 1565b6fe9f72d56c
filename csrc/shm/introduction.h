#pragma once

#include <string>
#include <vector>

#include "core/process.h"

namespace torchtp::shm {

// Which process this is, in a word: equal for threads of one process.
std::string own_process();

// The processes that the ranks said they are.
class KnownProcesses {
 public:
  KnownProcesses(std::vector<std::string> said, int rank);

  const std::vector<std::string>& said() const { return said_; }
  // Those that cannot be seen from here are taken to live.
  bool has_died(int rank) const;

 private:
  struct Peer {
    pid_t pid = 0;  // 0: is not watched
    uint64_t started_at = 0;
  };
  std::vector<std::string> said_;
  std::vector<Peer> peers_;
};

// The first words of a rank to the others of its host while a group is made: which torchtp it runs and which process it
// is.
std::string introduction();

// The processes of ranks that introduced themselves. Throws when one runs another torchtp than rank 0: the same on all
// ranks.
std::vector<std::string> processes_of(const std::vector<std::string>& introductions);

}  // namespace torchtp::shm
