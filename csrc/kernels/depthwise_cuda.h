#pragma once

#include <cuda_runtime_api.h>

#include "kernels/depthwise.h"

namespace torchtp::kernels {

// As the functions of depthwise.h, enqueued on `stream`: one launch for the interior, one or two (halo rows, halo
// columns) for the border. Throws torchtp::Error if a launch is refused. T is float, c10::BFloat16 or c10::Half.
template <typename T>
void launch_depthwise(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out, const DepthwiseParams& params,
                      Part part, cudaStream_t stream);
template <typename T>
void launch_depthwise_input_grad(const HaloPlanes<T>& grad_out, const T* weight, T* grad_in,
                                 const DepthwiseParams& params, Part part, cudaStream_t stream);

}  // namespace torchtp::kernels
