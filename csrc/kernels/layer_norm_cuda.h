#pragma once

#include <cuda_runtime_api.h>

#include "kernels/factors.h"
#include "kernels/layer_norm.h"

namespace torchtp::kernels {

// Over the channels of [batches, channels, inner], or of [batches, inner, channels] where channels come last; mean and
// rstd are [batches, inner]. Up to 2048 channels. T is float, c10::BFloat16 or c10::Half. Enqueued on `stream`; one
// launch.
bool layer_norm_fits_cuda(const LayerNormParams& params, bool channels_last, int device);
template <typename T>
void launch_layer_norm(const T* x, const Factors<T>& weight, const Factors<T>& bias, double eps, T* y, float* mean,
                       float* rstd, const LayerNormParams& params, bool channels_last, cudaStream_t stream);

// dx may be null; gradients: [2, channels], of weight and bias, of T or float. `scratch` has layer_norm_scratch floats.
// Two launches; the same bits on every run.
int64_t layer_norm_scratch(const LayerNormParams& params);
template <typename T, typename G>
void launch_layer_norm_backward(const T* dy, const T* x, const Factors<T>& weight, const float* mean, const float* rstd,
                                T* dx, G* gradients, float* scratch, const LayerNormParams& params, bool channels_last,
                                cudaStream_t stream);

}  // namespace torchtp::kernels
