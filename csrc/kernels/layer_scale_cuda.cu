#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"
#include "kernels/layer_scale_cuda.h"

namespace torchtp::kernels {

template <typename T, typename A>
void launch_layer_scale(const LayerScaleParams<T, A>& params, bool channels_last, cudaStream_t stream) {
  if (params.elements() == 0) return;
  with_layer_scale(params, channels_last, [&](const auto& work) { RunOnDevice{"layer_scale", stream}.each(work); });
}

#define TORCHTP_LAYER_SCALE(T, A) template void launch_layer_scale(const LayerScaleParams<T, A>&, bool, cudaStream_t);
TORCHTP_LAYER_SCALE(float, float)
TORCHTP_LAYER_SCALE(double, double)
TORCHTP_LAYER_SCALE(c10::BFloat16, float)
TORCHTP_LAYER_SCALE(c10::Half, float)
#undef TORCHTP_LAYER_SCALE

}  // namespace torchtp::kernels
