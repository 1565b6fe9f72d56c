#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/interval.h"

namespace torchtp {

// What one rank sends and receives when every rank wants some interval of a cut dim. Computed by both sides of every
// message from the same integers, so shapes are never sent.
struct PullPlan {
  struct Part {
    int peer;
    Interval rows;  // global
  };

  Interval own;                // what this rank holds
  Interval wanted;             // what it wants, clipped to [0, extent)
  Interval kept;               // own rows it wants itself
  std::vector<Part> sends;     // ascending peers
  std::vector<Part> receives;  // ascending peers
  bool anyone_moves = false;   // some rank of the group sends something: known to all alike
};

// `wanted[r]` is what rank r wants; overhang beyond [0, extent) is ignored.
PullPlan make_pull_plan(int64_t extent, int rank, const std::vector<Interval>& wanted);

// Plans of one group, remembered. Thread-safe.
class PullPlans {
 public:
  static constexpr size_t kMostPlans = 4096;  // some hundred bytes each

  std::shared_ptr<const PullPlan> get(int64_t extent, int rank, const std::vector<Interval>& wanted);

 private:
  std::mutex mutex_;
  std::map<std::vector<int64_t>, std::shared_ptr<const PullPlan>> plans_;
};

}  // namespace torchtp
