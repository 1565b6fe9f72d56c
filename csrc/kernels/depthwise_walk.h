#pragma once

#include <cstdint>
#include <numeric>

#include "kernels/depthwise.h"

namespace torchtp::kernels {

// What the outputs of one tile read along a dim: the first line (row or column) of their window in memory, and the
// numbers first + step * i, i < taps, of the taps that their i-th lines meet.
struct TapRun {
  int32_t line, taps, first, step;
};

// How outputs walk over what they read along one dim, for any kernel, stride and dilation, as numbers. The outputs of a
// tile are step() apart, the lines of its window in_step(): so that output number j of the tile reads lines
// [skip() * j, skip() * j + taps) of the window, a convolution without dilation. With `common` the greatest common
// divisor of both, stride = common * s and dilation = common * d:
//
// Output o of a convolution reads lines common * (s * o + d * k) - offset: outputs d apart, lines common * d apart,
// s of them from one output to the next.
//
// The gradient of its input: input i was read by outputs (i + offset - common * d * k) / (common * s), where that is a
// whole number. Inputs common * s * d apart have their taps in common, every s-th one, and outputs d apart: a
// convolution with a stride of 1, of as many taps as `output` has, which may be none.
struct DepthwiseWalk {
  enum class Kind { kForward, kMirrored, kPhases };  // kMirrored: the gradient at a stride of 1, all taps in reverse

  Kind kind;
  int32_t kernel, common, stride, dilation, offset;  // stride and dilation over `common`

  static DepthwiseWalk make(const DepthwiseAxis& axis, bool input_grad) {
    const int32_t common = std::gcd(axis.stride, axis.dilation);
    const bool unit = axis.stride == 1;
    return {input_grad ? (unit ? Kind::kMirrored : Kind::kPhases) : Kind::kForward,
            axis.kernel,
            common,
            axis.stride / common,
            axis.dilation / common,
            input_grad && unit ? axis.reach() - axis.offset : axis.offset};
  }

  TORCHTP_HOST_DEVICE bool in_phases() const { return kind == Kind::kPhases; }
  TORCHTP_HOST_DEVICE int32_t step() const { return in_phases() ? common * stride * dilation : dilation; }
  TORCHTP_HOST_DEVICE int32_t in_step() const { return in_phases() ? dilation : common * dilation; }
  TORCHTP_HOST_DEVICE int32_t skip() const { return in_phases() ? 1 : stride; }
  TORCHTP_HOST_DEVICE int32_t most_taps() const { return in_phases() ? (kernel + stride - 1) / stride : kernel; }

  // Of the tile whose first output is `output`.
  TORCHTP_HOST_DEVICE TapRun run(int32_t output) const {
    if (!in_phases()) {
      const bool mirrored = kind == Kind::kMirrored;
      return {output * common * stride - offset, kernel, mirrored ? kernel - 1 : 0, mirrored ? -1 : 1};
    }
    const int32_t place = output + offset, whole = place / common;
    if (whole * common != place) return {0, 0, 0, 0};
    int32_t rest = whole % stride, tap = 0;
    for (; rest != 0; ++tap) rest = (rest - dilation) % stride;
    if (tap >= kernel) return {0, 0, 0, 0};
    const int32_t more = (kernel - 1 - tap) / stride;
    return {(whole - dilation * tap) / stride - dilation * more, more + 1, tap + stride * more, -stride};
  }
};

}  // namespace torchtp::kernels
