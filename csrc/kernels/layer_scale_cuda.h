#pragma once

#include <cuda_runtime_api.h>

#include "kernels/layer_scale.h"

namespace torchtp::kernels {

// One launch on `stream`. T is float, double, c10::BFloat16 or c10::Half.
template <typename T, typename A>
void launch_layer_scale(const LayerScaleParams<T, A>& params, bool channels_last, cudaStream_t stream);

}  // namespace torchtp::kernels
