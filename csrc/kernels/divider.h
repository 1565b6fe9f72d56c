#pragma once

#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace torchtp::kernels {

// Divides numbers below 2^31 by one that the host knows, with a multiplication: a division takes the device some twenty
// instructions. Granlund and Montgomery, "Division by invariant integers using multiplication" (1994), figure 4.1.
struct Divider {
  int32_t divisor = 1;
  uint32_t multiplier = 1;
  int shift = 0;

  Divider() = default;
  explicit Divider(int64_t by) : divisor(by > 1 ? static_cast<int32_t>(by) : 1) {
    while ((int64_t{1} << shift) < divisor) ++shift;
    const uint64_t above = (uint64_t{1} << shift) - static_cast<uint64_t>(divisor);
    multiplier = static_cast<uint32_t>((above << 32) / static_cast<uint64_t>(divisor) + 1);
  }

  TORCHTP_HOST_DEVICE int32_t quotient(int32_t value) const {
    const auto number = static_cast<uint32_t>(value);
    const auto high = static_cast<uint32_t>((uint64_t{multiplier} * number) >> 32);
    return static_cast<int32_t>((high + number) >> shift);
  }
  TORCHTP_HOST_DEVICE int32_t rest(int32_t value) const { return value - quotient(value) * divisor; }
};

// The same for numbers of any size, by a division.
struct LongDivider {
  int64_t divisor = 1;

  LongDivider() = default;
  explicit LongDivider(int64_t by) : divisor(by > 1 ? by : 1) {}
  TORCHTP_HOST_DEVICE int64_t quotient(int64_t value) const { return value / divisor; }
};

// Calls f with a Divider, or with a LongDivider where numbers reach `most` and that is too much.
template <typename F>
void with_division(int64_t most, const F& f) {
  if (most <= std::numeric_limits<int32_t>::max()) {
    f(Divider());
  } else {
    f(LongDivider());
  }
}

// A walk over a grid of `width` columns in steps of the block's threads, without a division a step.
struct Walk {
  int32_t row, column;
  int32_t width, step_rows, step_columns;

  TORCHTP_HOST_DEVICE Walk(int32_t first, int32_t step, int32_t width)
      : row(first / width), column(first % width), width(width), step_rows(step / width), step_columns(step % width) {}
  TORCHTP_HOST_DEVICE void next() {
    row += step_rows;
    column += step_columns;
    if (column >= width) {
      column -= width;
      ++row;
    }
  }
};

}  // namespace torchtp::kernels
