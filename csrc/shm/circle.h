#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shm/told_wait.h"

namespace torchtp::shm {

class Group;

// Ranks that wait for one another: a rank that asks misses the first, each of them blocks for the next, the last for
// the rank that asks.
struct Circle {
  struct Link {
    int rank;
    int called;
    ToldWait wait;
  };

  const Group* group = nullptr;  // whose boards tell it and whose numbers the ranks have; may have ended since
  std::string name;              // of that group
  int asking = 0;                // as it is called there
  std::vector<Link> links;       // none: there is no circle
  bool is_settled = false;       // has gone on so long that who fails in it is not expected to come elsewhere then

  // "of group 'all' rank 0 waits for rank 1, rank 1 in allreduce #7 (...) of group 'b' for rank 2, rank 2 in ...".
  std::string describe() const;
};

// What the ranks of a group tell; nothing of one that does not run: that may have ended long ago.
using WaitsOf = std::function<std::vector<ToldWait>(int rank)>;

// A shortest circle for a rank that misses others.
std::vector<Circle::Link> find_circle(int asking, uint64_t missing, const WaitsOf& waits_of);

// Whether the same waits go on; those of a settled circle may have failed since.
bool goes_on(const Circle& circle, int asking, uint64_t missing, const WaitsOf& waits_of);

}  // namespace torchtp::shm
