#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"
#include "kernels/depthwise_layer_norm_cuda.h"
#include "kernels/depthwise_layer_norm_plan.h"

namespace torchtp::kernels {

template <typename T>
void launch_depthwise_layer_norm(const HaloPlanes<T>& in, const DepthwiseLayerNormArgs<T>& args,
                                 const DepthwiseParams& params, Part part, cudaStream_t stream) {
  run_depthwise_layer_norm(RunOnDevice{"depthwise_layer_norm", stream}, in, args, params, part);
}

#define TORCHTP_DEPTHWISE_LAYER_NORM(T)                                                             \
  template void launch_depthwise_layer_norm(const HaloPlanes<T>&, const DepthwiseLayerNormArgs<T>&, \
                                            const DepthwiseParams&, Part, cudaStream_t);
TORCHTP_DEPTHWISE_LAYER_NORM(float)
TORCHTP_DEPTHWISE_LAYER_NORM(c10::BFloat16)
TORCHTP_DEPTHWISE_LAYER_NORM(c10::Half)
#undef TORCHTP_DEPTHWISE_LAYER_NORM

}  // namespace torchtp::kernels
