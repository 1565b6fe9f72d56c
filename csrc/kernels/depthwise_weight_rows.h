#pragma once

#include <vector>

#include "kernels/depthwise.h"

namespace torchtp::kernels {

// The gradient of the filters of depthwise.h for the CPU's vector instructions, on dense planes of any extents: the sum
// over rows, columns and batches of the output's gradient times the input. Rows are laid beside each other as numbers
// that the sums are taken in, float or double, with the zeros of the padding; each row of the input is read once and
// meets all rows of the gradient that a tap joins it with.
//
// in: [N, C, in_height, in_width], grad_out: [N, C, out_height, out_width], both channels last in memory where params
// say so; grad_weight: [C, kernel_y, kernel_x], of which the channels from `first` to before `last` are written.
template <typename T>
using DepthwiseWeightGrad = void(const T* in, const T* grad_out, T* grad_weight, const DepthwiseParams& params,
                                 int64_t first, int64_t last);

// Those that this processor has the instructions for, the widest first.
template <typename T>
std::vector<DepthwiseWeightGrad<T>*> depthwise_weight_rows_of_each_width();

// By the widest.
template <typename T>
void depthwise_weight_rows(const T* in, const T* grad_out, T* grad_weight, const DepthwiseParams& params, int64_t first,
                           int64_t last);

namespace avx2 {
template <typename T>
void depthwise_weight_rows(const T* in, const T* grad_out, T* grad_weight, const DepthwiseParams& params, int64_t first,
                           int64_t last);
}

}  // namespace torchtp::kernels
