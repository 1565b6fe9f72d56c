#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/host_device.h"

namespace torchtp::kernels {

// The arithmetic that all layouts and devices share.
template <typename A>
TORCHTP_HOST_DEVICE A layer_norm_rstd(A variance, A eps) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<A, float>) return rsqrtf(variance + eps);  // a tenth of the instructions, 2 ulp
#endif
  return A(1) / std::sqrt(variance + eps);
}
template <typename A>
TORCHTP_HOST_DEVICE A layer_norm_normed(A x, A mean, A rstd) {
  return (x - mean) * rstd;
}
template <typename A>
TORCHTP_HOST_DEVICE A layer_norm_apply(A x, A mean, A rstd, A weight, A bias) {
  return layer_norm_normed(x, mean, rstd) * weight + bias;
}
// Of x, from the weighted gradient, its mean over the channels and its mean product with what was normed.
template <typename A>
TORCHTP_HOST_DEVICE A layer_norm_grad(A weighted, A normed, A rstd, A mean, A dot) {
  return rstd * (weighted - mean - normed * dot);
}

// Layer norm over the channels of a contiguous [batches, channels, inner]: each of batches * inner positions is normed
// over its `channels` elements, which lie `inner` apart. Positions are done in blocks that stay in the cache, so that
// memory is read once; loops run over neighbouring positions. A is float, or double for double.
struct LayerNormParams {
  int64_t batches, channels, inner;

  int64_t block() const {
    const int64_t fits = 32768 / (channels > 0 ? channels : 1);
    return fits < 32 ? 32 : (fits > 1024 ? 1024 : fits);
  }
  int64_t blocks_per_batch() const { return (inner + block() - 1) / block(); }
  // What a call's range [begin, end) counts.
  int64_t num_blocks() const { return batches * blocks_per_batch(); }
};

// weight and bias may be null; mean and rstd are [batches, inner].
template <typename T, typename A>
void layer_norm_channels_first_cpu(const T* x, const A* weight, const A* bias, double eps, T* y, A* mean, A* rstd,
                                   const LayerNormParams& params, int64_t begin, int64_t end);

// dx may be null. grad_weight and grad_bias (of `channels`, zeroed by the caller) are added to; null where not wanted.
template <typename T, typename A>
void layer_norm_channels_first_backward_cpu(const T* dy, const T* x, const A* weight, const A* mean, const A* rstd,
                                            T* dx, double* grad_weight, double* grad_bias,
                                            const LayerNormParams& params, int64_t begin, int64_t end);

}  // namespace torchtp::kernels
