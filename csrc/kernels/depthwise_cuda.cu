#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"
#include "kernels/depthwise_cuda.h"
#include "kernels/depthwise_plan.h"

namespace torchtp::kernels {
template <typename T>
void launch_depthwise(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out, const DepthwiseParams& params,
                      Part part, cudaStream_t stream) {
  run_depthwise(RunOnDevice{"depthwise", stream}, in, weight, bias, out, params, part);
}

template <typename T>
void launch_depthwise_input_grad(const HaloPlanes<T>& grad_out, const T* weight, T* grad_in,
                                 const DepthwiseParams& params, Part part, cudaStream_t stream) {
  run_depthwise_input_grad(RunOnDevice{"depthwise_input_grad", stream}, grad_out, weight, grad_in, params, part);
}

#define TORCHTP_DEPTHWISE(T)                                                                                  \
  template void launch_depthwise(const HaloPlanes<T>&, const T*, const T*, T*, const DepthwiseParams&, Part,  \
                                 cudaStream_t);                                                               \
  template void launch_depthwise_input_grad(const HaloPlanes<T>&, const T*, T*, const DepthwiseParams&, Part, \
                                            cudaStream_t);
TORCHTP_DEPTHWISE(float)
TORCHTP_DEPTHWISE(c10::BFloat16)
TORCHTP_DEPTHWISE(c10::Half)
#undef TORCHTP_DEPTHWISE

}  // namespace torchtp::kernels
