#pragma once

#include <cuda_runtime_api.h>

#include "kernels/depthwise_layer_norm.h"

namespace torchtp::kernels {

// As depthwise_layer_norm_cpu, enqueued on `stream`: one launch for all or the interior, one or two for the border.
template <typename T>
void launch_depthwise_layer_norm(const HaloPlanes<T>& in, const DepthwiseLayerNormArgs<T>& args,
                                 const DepthwiseParams& params, Part part, cudaStream_t stream);

}  // namespace torchtp::kernels
