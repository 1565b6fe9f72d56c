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

template <typename T, typename A>
void launch_max_pool_backward(const T* grad_output, const int64_t* indices, A* grad_frame, const MaxPoolParams& params,
                              cudaStream_t stream) {
  run_max_pool_backward(RunOnDevice{"max_pool_backward", stream}, grad_output, indices, grad_frame, params);
}

#define TORCHTP_MAX_POOL(T, A)                                                                            \
  template void launch_max_pool_gather(const T*, const int64_t*, T*, const MaxPoolParams&, cudaStream_t); \
  template void launch_max_pool_backward(const T*, const int64_t*, A*, const MaxPoolParams&, cudaStream_t);
TORCHTP_MAX_POOL(float, float)
TORCHTP_MAX_POOL(double, double)
TORCHTP_MAX_POOL(c10::BFloat16, float)
TORCHTP_MAX_POOL(c10::Half, float)
#undef TORCHTP_MAX_POOL

}  // namespace torchtp::kernels
