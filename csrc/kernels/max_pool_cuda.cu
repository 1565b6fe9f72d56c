#include "kernels/max_pool_cuda.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"
#include "kernels/max_pool_each.h"

namespace torchtp::kernels {

void launch_max_pool_to_global(int64_t* indices, const PoolIndex& index, int64_t count, cudaStream_t stream) {
  run_max_pool_to_global(RunOnDevice{"max_pool", stream}, indices, index, count);
}

template <typename T>
void launch_max_pool_gather(const T* frame, const int64_t* indices, T* out, const MaxPoolParams& params,
                            cudaStream_t stream) {
  run_max_pool_gather(RunOnDevice{"max_pool_gather", stream}, frame, indices, out, params);
}

template <typename T, typename G>
void launch_max_pool_backward(const T* grad_output, const int64_t* indices, G* grad_frame, const MaxPoolParams& params,
                              cudaStream_t stream) {
  run_max_pool_backward(RunOnDevice{"max_pool_backward", stream}, grad_output, indices, grad_frame, params);
}

#define TORCHTP_MAX_POOL_BACKWARD(T, G) \
  template void launch_max_pool_backward(const T*, const int64_t*, G*, const MaxPoolParams&, cudaStream_t);
TORCHTP_MAX_POOL_BACKWARD(float, float)
TORCHTP_MAX_POOL_BACKWARD(double, double)
TORCHTP_MAX_POOL_BACKWARD(c10::BFloat16, float)
TORCHTP_MAX_POOL_BACKWARD(c10::BFloat16, c10::BFloat16)
TORCHTP_MAX_POOL_BACKWARD(c10::Half, float)
TORCHTP_MAX_POOL_BACKWARD(c10::Half, c10::Half)
#undef TORCHTP_MAX_POOL_BACKWARD

#define TORCHTP_MAX_POOL_GATHER(T) \
  template void launch_max_pool_gather(const T*, const int64_t*, T*, const MaxPoolParams&, cudaStream_t);
TORCHTP_MAX_POOL_GATHER(float)
TORCHTP_MAX_POOL_GATHER(double)
TORCHTP_MAX_POOL_GATHER(c10::BFloat16)
TORCHTP_MAX_POOL_GATHER(c10::Half)
#undef TORCHTP_MAX_POOL_GATHER

}  // namespace torchtp::kernels
