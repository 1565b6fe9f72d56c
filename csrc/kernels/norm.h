#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace torchtp::kernels {

// The passes of batch and group norm over [batches, channels, inner], contiguous ("planes" of `inner` elements) or with
// the channels innermost ("rows" of `channels` elements). Factors are one number for each (batch, channel), or for each
// channel with a batch_stride of 0. 16-bit elements are computed with in float: A is float or double.

// The arithmetic that all layouts and devices share.

// Adds values with that count, mean and m2 (sum of squared differences from the mean) to those of `count` others
// (Chan's rule). One of the counts must not be zero.
template <typename A>
TORCHTP_HOST_DEVICE void norm_merge(A count, A other_count, A other_mean, A other_m2, A& mean, A& m2) {
  // One division, which is the same for all channels that are merged at once.
  const A delta = other_mean - mean, share = other_count / (count + other_count);
  mean += delta * share;
  m2 += other_m2 + delta * delta * (count * share);
}
template <typename A>
TORCHTP_HOST_DEVICE A norm_apply(A x, A center, A scale, A shift) {
  return (x - center) * scale + shift;
}
template <typename A>
TORCHTP_HOST_DEVICE A norm_grad(A dy, A x, A center, A on_dy, A on_x, A shift) {
  return dy * on_dy + (x - center) * on_x + shift;
}

// What a pass over dense memory needs to know of the tensor.
struct NormShape {
  int64_t channels, inner;
  int64_t batch_stride;  // of the factors: channels or 0
};

// Mean and sum of squared differences from it, of each plane in [begin, end).
template <typename T>
void norm_moments_planes_cpu(const T* x, const NormShape& shape, double* mean, double* m2, int64_t begin, int64_t end);
// The same of each channel over rows [begin, end).
template <typename T>
void norm_moments_rows_cpu(const T* x, const NormShape& shape, double* mean, double* m2, int64_t begin, int64_t end);

// Sums of dy and of dy * (x - center).
template <typename T, typename A>
void norm_dots_planes_cpu(const T* dy, const T* x, const A* center, const NormShape& shape, double* sum, double* dot,
                          int64_t begin, int64_t end);
// Rows [begin, end) of one batch.
template <typename T, typename A>
void norm_dots_rows_cpu(const T* dy, const T* x, const A* center, const NormShape& shape, double* sum, double* dot,
                        int64_t begin, int64_t end);

// y = (x - center) * scale + shift over planes or rows [begin, end).
template <typename T, typename A>
void norm_affine_cpu(const T* x, T* y, const A* center, const A* scale, const A* shift, const NormShape& shape,
                     bool channels_last, int64_t begin, int64_t end);

// dx = dy * on_dy + (x - center) * on_x + shift.
template <typename T, typename A>
void norm_combine_cpu(const T* dy, const T* x, T* dx, const A* center, const A* on_dy, const A* on_x, const A* shift,
                      const NormShape& shape, bool channels_last, int64_t begin, int64_t end);

}  // namespace torchtp::kernels
