#pragma once

#include <algorithm>
#include <chrono>

namespace torchtp {

// A point in time by which something must have happened; any number of milliseconds is fine.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(std::chrono::milliseconds from_now)
      : at_(Clock::now() + std::min(from_now, std::chrono::milliseconds(std::chrono::hours(24 * 365)))) {}

  std::chrono::nanoseconds left() const { return std::max(at_ - Clock::now(), Clock::duration::zero()); }
  bool passed() const { return Clock::now() >= at_; }
  void put_off(Clock::duration by) { at_ += by; }

 private:
  Clock::time_point at_;
};

}  // namespace torchtp
