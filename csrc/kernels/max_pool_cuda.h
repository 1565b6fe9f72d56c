#pragma once

#include <cuda_runtime_api.h>

#include "kernels/max_pool.h"

namespace torchtp::kernels {

// One launch on `stream` each; see max_pool.h. T is float, double, c10::BFloat16 or c10::Half, G is T, or float for a
// type of 16 bits.
void launch_max_pool_to_global(int64_t* indices, const PoolIndex& index, int64_t count, cudaStream_t stream);
template <typename T>
void launch_max_pool_gather(const T* frame, const int64_t* indices, T* out, const MaxPoolParams& params,
                            cudaStream_t stream);
// Writes every element of the frame, which is aligned to 16 bytes.
template <typename T, typename G>
void launch_max_pool_backward(const T* grad_output, const int64_t* indices, G* grad_frame, const MaxPoolParams& params,
                              cudaStream_t stream);

}  // namespace torchtp::kernels
