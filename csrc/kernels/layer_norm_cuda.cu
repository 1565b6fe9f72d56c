#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"
#include "kernels/layer_norm_cuda.h"
#include "kernels/layer_norm_plan.h"

namespace torchtp::kernels {

bool layer_norm_fits_cuda(const LayerNormParams& params, bool channels_last, int64_t element_bytes, int device) {
  return layer_norm_fits(params, channels_last, element_bytes, most_shared_bytes(device));
}
int64_t layer_norm_scratch(const LayerNormParams& params) { return layer_norm_backward_scratch(params); }

template <typename T>
void launch_layer_norm(const T* x, const float* weight, const float* bias, double eps, T* y, float* mean, float* rstd,
                       const LayerNormParams& params, bool channels_last, cudaStream_t stream) {
  run_layer_norm(RunOnDevice{"layer_norm", stream}, x, weight, bias, eps, y, mean, rstd, params, channels_last);
}

template <typename T>
void launch_layer_norm_backward(const T* dy, const T* x, const float* weight, const float* mean, const float* rstd,
                                T* dx, float* gradients, float* scratch, const LayerNormParams& params,
                                bool channels_last, cudaStream_t stream) {
  run_layer_norm_backward(RunOnDevice{"layer_norm_backward", stream}, dy, x, weight, mean, rstd, dx, gradients, scratch,
                          params, channels_last);
}

#define TORCHTP_LAYER_NORM(T)                                                                                        \
  template void launch_layer_norm(const T*, const float*, const float*, double, T*, float*, float*,                  \
                                  const LayerNormParams&, bool, cudaStream_t);                                       \
  template void launch_layer_norm_backward(const T*, const T*, const float*, const float*, const float*, T*, float*, \
                                           float*, const LayerNormParams&, bool, cudaStream_t);
TORCHTP_LAYER_NORM(float)
TORCHTP_LAYER_NORM(c10::BFloat16)
TORCHTP_LAYER_NORM(c10::Half)
#undef TORCHTP_LAYER_NORM

}  // namespace torchtp::kernels
