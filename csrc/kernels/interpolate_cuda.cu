#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"
#include "kernels/interpolate_cuda.h"

namespace torchtp::kernels {

template <typename T>
void launch_interpolate(const T* in, T* out, const ResampleParams& params, cudaStream_t stream) {
  run_interpolate(RunOnDevice{"interpolate", stream}, in, out, params);
}

template <typename T, typename G>
void launch_interpolate_adjoint(const T* out, G* in, const ResampleParams& params, cudaStream_t stream) {
  run_interpolate_adjoint(RunOnDevice{"interpolate_backward", stream}, out, in, params);
}

#define TORCHTP_INTERPOLATE(T)                                                         \
  template void launch_interpolate(const T*, T*, const ResampleParams&, cudaStream_t); \
  template void launch_interpolate_adjoint(const T*, T*, const ResampleParams&, cudaStream_t);
TORCHTP_INTERPOLATE(float)
TORCHTP_INTERPOLATE(c10::BFloat16)
TORCHTP_INTERPOLATE(c10::Half)
#undef TORCHTP_INTERPOLATE
template void launch_interpolate_adjoint(const c10::BFloat16*, float*, const ResampleParams&, cudaStream_t);
template void launch_interpolate_adjoint(const c10::Half*, float*, const ResampleParams&, cudaStream_t);

}  // namespace torchtp::kernels
