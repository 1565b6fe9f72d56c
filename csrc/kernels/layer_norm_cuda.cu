#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"
#include "kernels/layer_norm_cuda.h"
#include "kernels/layer_norm_plan.h"

namespace torchtp::kernels {

bool layer_norm_fits_cuda(const LayerNormParams& params, bool channels_last, int device) {
  return layer_norm_fits(params, channels_last, most_shared_bytes(device));
}
int64_t layer_norm_scratch(const LayerNormParams& params) { return layer_norm_backward_scratch(params); }

template <typename T>
void launch_layer_norm(const T* x, const Factors<T>& weight, const Factors<T>& bias, double eps, T* y, float* mean,
                       float* rstd, const LayerNormParams& params, bool channels_last, cudaStream_t stream) {
  run_layer_norm(RunOnDevice{"layer_norm", stream}, x, weight, bias, eps, y, mean, rstd, params, channels_last);
}

template <typename T, typename G>
void launch_layer_norm_backward(const T* dy, const T* x, const Factors<T>& weight, const float* mean, const float* rstd,
                                T* dx, G* gradients, float* scratch, const LayerNormParams& params, bool channels_last,
                                cudaStream_t stream) {
  run_layer_norm_backward(RunOnDevice{"layer_norm_backward", stream}, dy, x, weight, mean, rstd, dx, gradients, scratch,
                          params, channels_last);
}

#define TORCHTP_LAYER_NORM_BACKWARD(T, G)                                                                             \
  template void launch_layer_norm_backward(const T*, const T*, const Factors<T>&, const float*, const float*, T*, G*, \
                                           float*, const LayerNormParams&, bool, cudaStream_t);
#define TORCHTP_LAYER_NORM(T)                                                                                 \
  template void launch_layer_norm(const T*, const Factors<T>&, const Factors<T>&, double, T*, float*, float*, \
                                  const LayerNormParams&, bool, cudaStream_t);                                \
  TORCHTP_LAYER_NORM_BACKWARD(T, float)
TORCHTP_LAYER_NORM(float)
TORCHTP_LAYER_NORM(c10::BFloat16)
TORCHTP_LAYER_NORM(c10::Half)
TORCHTP_LAYER_NORM_BACKWARD(c10::BFloat16, c10::BFloat16)
TORCHTP_LAYER_NORM_BACKWARD(c10::Half, c10::Half)
#undef TORCHTP_LAYER_NORM
#undef TORCHTP_LAYER_NORM_BACKWARD

}  // namespace torchtp::kernels
