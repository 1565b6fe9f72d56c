#pragma once

#include <cuda_runtime_api.h>

#include "kernels/depthwise_weight_grad.h"

namespace torchtp::kernels {

// As in depthwise_weight_grad.h, enqueued on `stream`: two launches. T is float, c10::BFloat16 or c10::Half.
template <typename T>
void launch_depthwise_weight_grad(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, T* grad_weight,
                                  float* scratch, const DepthwiseParams& params, cudaStream_t stream);

}  // namespace torchtp::kernels
