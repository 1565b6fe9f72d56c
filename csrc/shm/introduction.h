#pragma once

#include <string>
#include <vector>

#include "core/process.h"
#include "shm/bootstrap.h"

namespace torchtp::shm {

// The first words of a rank to the others while a group is made: which torchtp it runs and which process it is.
std::string introduction();

// The processes that the ranks said they are.
class Introduced {
 public:
  // Throws when a rank runs another torchtp than rank 0: the same on all ranks.
  Introduced(const std::vector<std::string>& introductions, int rank);

  // Equal for ranks that are threads of one process.
  const std::vector<std::string>& processes() const { return processes_; }
  // Those that cannot be seen from here are taken to live.
  bool has_died(int rank) const;

 private:
  struct Peer {
    pid_t pid = 0;  // 0: is not watched
    uint64_t started_at = 0;
  };
  std::vector<std::string> processes_;
  std::vector<Peer> peers_;
};

}  // namespace torchtp::shm
