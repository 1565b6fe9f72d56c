#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "shm/circle.h"
#include "shm/group.h"
#include "shm/liveness.h"
#include "shm/told_wait.h"

namespace torchtp::shm {

// "rank 2", "ranks 1, 3", as the ranks are called (see GroupOptions).
std::string rank_list(uint64_t mask, const std::vector<int>& called);

// What one long wait learns about the ranks it waits for: who was stopped, and since when at least; who waits
// elsewhere.
class Stall {
 public:
  using Clock = std::chrono::steady_clock;

  // `rank`: that waits.
  Stall(const Liveness& liveness, const std::vector<int>& called, int rank, WaitsOf waits_of,
        std::function<bool(uint64_t missing, Circle&)> follow, std::chrono::nanoseconds deadlock_after)
      : liveness_(liveness),
        called_(called),
        rank_(rank),
        waits_of_(std::move(waits_of)),
        follow_(std::move(follow)),
        deadlock_after_(deadlock_after),
        begin_(Clock::now()) {}

  // Looks at the processes of the ranks that are missing, at most every 50 ms. `is_blocked`: as in ToldWait.
  void look(Awaited& awaited, bool is_blocked);
  std::chrono::nanoseconds age() const { return Clock::now() - begin_; }
  // Whether the looks have found running ranks waiting for one another and this one for so long, in the same circle.
  bool is_deadlock() const { return circle_age() >= deadlock_after_; }
  // "allreduce #7 (...): ranks 1, 3 have not arrived after <10 s>; rank 1 runs and last called ...; rank 3 stopped
  // (SIGSTOP) 9.8 s ago and has been in allreduce #3 (...) of group 'tp' for 10 s".
  std::string describe(Awaited& awaited, const std::string& time) const;

 private:
  std::chrono::nanoseconds circle_age() const;
  // Nothing of one whose first thread waits in a call of ours: whether it naps or looks just now is chance.
  std::string state_of(int rank, const std::vector<ToldWait>& waits) const;
  bool waits_for_us(const std::vector<ToldWait>& waits) const;

  const Liveness& liveness_;
  const std::vector<int>& called_;
  const int rank_;
  const WaitsOf waits_of_;
  const std::function<bool(uint64_t missing, Circle&)> follow_;  // as in Whereabouts
  const std::chrono::nanoseconds deadlock_after_;
  const Clock::time_point begin_;
  bool is_blocked_ = false;
  Clock::time_point looked_at_ = begin_;
  std::array<Clock::time_point, kMaxRanks> stopped_at_{};
  Circle circle_;
  Clock::time_point circle_seen_at_;
};

}  // namespace torchtp::shm
