#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "spatial/numbers.h"

// The passes that batch norm and group norm share, over x of [N, C, ...] in a dense layout (slab.h's `dense`). Numbers
// are of each (batch, channel), [N, C], or with one row of each channel. On the CPU, and by ATen for what has no
// kernels on a device (norm_cuda.h).
namespace torchtp::spatial {

struct Moments {
  Numbers mean, m2;  // m2: sum of squared differences from the mean
};

// Of every (batch, channel) of x: [N, C] each.
Moments moments(const at::Tensor& x);
// Sum of dy and of dy * (x - center) of every (batch, channel): [N, C] each.
std::tuple<Numbers, Numbers> dots(const at::Tensor& dy, const at::Tensor& x, const Numbers& center);
// (x - center) * scale + shift.
at::Tensor affine(const at::Tensor& x, const Numbers& center, const Numbers& scale, const Numbers& shift);
// dy * on_dy + (x - center) * on_x + shift.
at::Tensor combine(const at::Tensor& dy, const at::Tensor& x, const Numbers& center, const Numbers& on_dy,
                   const Numbers& on_x, const Numbers& shift);

// Statistics of several parts, a row each, as those of the whole: counts [P, 1], mean and m2 [P, K]. Parts of count 0
// may hold anything finite.
Moments merge(const Numbers& counts, const Moments& parts);
// The same over the ranks of the groups, in rank order: every rank gets the same bits. Mine are [1, K]. Also the total
// count, [1, 1]. One small all_gather a group.
std::tuple<Moments, Numbers> merge_over(const Moments& mine, int64_t count, const std::vector<std::string>& groups);

// float for 16-bit types.
at::ScalarType statistics_type(at::ScalarType type);

// Gradients of (dx, dw, db) = norm backward with regard to (dy, x, w), for any norm: x of [A, K, ...] is normed over
// `dims`, w broadcasts against x. The cotangents may be undefined. Returns (for dy, for x, for w before it is summed
// to w's shape). `constant`: the statistics were not computed from x, as in evaluation; else one allreduce.
std::array<at::Tensor, 3> norm_double_backward(const std::array<at::Tensor, 3>& cotangents, const at::Tensor& dy,
                                               const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean,
                                               const at::Tensor& invstd, at::IntArrayRef dims, bool constant,
                                               const std::vector<std::string>& groups);

}  // namespace torchtp::spatial
