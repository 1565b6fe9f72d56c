#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"
#include "kernels/depthwise_weight_grad_cuda.h"
#include "kernels/depthwise_weight_plan.h"

namespace torchtp::kernels {

template <typename T>
void launch_depthwise_weight_grad(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, T* grad_weight,
                                  float* scratch, const DepthwiseParams& params, cudaStream_t stream) {
  run_depthwise_weight_grad(RunOnDevice{"depthwise_weight_grad", stream}, in, grad_out, grad_weight, scratch, params);
}

#define TORCHTP_DEPTHWISE(T)                                                                         \
  template void launch_depthwise_weight_grad(const HaloPlanes<T>&, const HaloPlanes<T>&, T*, float*, \
                                             const DepthwiseParams&, cudaStream_t);
TORCHTP_DEPTHWISE(float)
TORCHTP_DEPTHWISE(c10::BFloat16)
TORCHTP_DEPTHWISE(c10::Half)
#undef TORCHTP_DEPTHWISE

}  // namespace torchtp::kernels
