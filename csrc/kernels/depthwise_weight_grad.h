#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"

namespace torchtp::kernels {

// The gradient of the filters of depthwise.h: the sum over rows, columns and batches of the output's gradient times the
// input. One of the two may bring its halo; the products counted are those of own elements of the other one (of both,
// where neither brings a halo), so that the ranks' shares add up.
//
// In two stages, so that every run gives the same bits: each block leaves its sums in `scratch`, then they are added in
// order.

// Number of floats, where a block may ask for `most_shared` bytes (device_limits_cuda.h).
int64_t depthwise_weight_grad_scratch(const HaloExtents& in, const HaloExtents& grad_out, const DepthwiseParams& params,
                                      size_t most_shared = kMostSharedBytes);

// grad_weight: [C, kernel_y, kernel_x].
template <typename T>
void depthwise_weight_grad_cpu(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, T* grad_weight, float* scratch,
                               const DepthwiseParams& params, size_t most_shared = kMostSharedBytes);

}  // namespace torchtp::kernels
