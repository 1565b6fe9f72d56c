#pragma once

#include <type_traits>

#include "kernels/depthwise.h"

namespace torchtp::kernels {

// Kernels up to this one are computed from pixels where they lie, channels last (depthwise_pixels.h); of larger ones
// the filter leaves no registers for what is on its way.
constexpr int kMostPixelsKernel = 3;
// The same with a stride of 2, channels first (depthwise_rows.h).
constexpr int kMostRowsKernel = 5;

// Calls take(kernel, stride), constants, where they are among those that tiles are compiled for; false where they are
// not.
template <int kStride, typename Take>
bool with_known_kernel(const DepthwiseParams& params, const Take& take) {
  if (params.y.kernel != params.x.kernel || params.y.stride != kStride || params.x.stride != kStride) return false;
  if (kStride > 1 && (params.y.dilation != 1 || params.x.dilation != 1)) return false;
  if (params.y.kernel == 3) {
    take(std::integral_constant<int, 3>(), std::integral_constant<int, kStride>());
  } else if (params.y.kernel == 5) {
    take(std::integral_constant<int, 5>(), std::integral_constant<int, kStride>());
  } else if (params.y.kernel == 7) {
    take(std::integral_constant<int, 7>(), std::integral_constant<int, kStride>());
  } else {
    return false;
  }
  return true;
}

// The same for programs that have tensor cores multiply: 16-bit numbers, unit steps.
template <typename T, typename Take>
bool with_band(const DepthwiseParams& params, const Take& take) {
  if constexpr (sizeof(T) == 2) {
    return unit_steps(params) && with_known_kernel<1>(params, take);
  } else {
    return false;
  }
}

}  // namespace torchtp::kernels
