#pragma once

#include <chrono>
#include <cstdint>

namespace torchtp {

// Nanoseconds of the clock that all processes of a host share and that never goes back.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace torchtp
