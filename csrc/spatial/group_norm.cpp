#include "spatial/group_norm.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include "backend/reduce.h"
#include "spatial/norm.h"
#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

// One number a (batch, group) as one a (batch, channel).
at::Tensor to_channels(const at::Tensor& numbers, int64_t channels) {
  return numbers.to(at::kDouble).repeat_interleave(channels / numbers.size(1), 1);
}

// Sums of [N, C] over the channels of each group.
at::Tensor to_groups(const at::Tensor& numbers, int64_t num_groups) {
  return numbers.view({numbers.size(0), num_groups, -1}).sum(2);
}

int64_t elements_per_group(const at::Tensor& x, int64_t num_groups) {
  int64_t count = x.size(1) / num_groups;
  for (int64_t dim = 2; dim < x.dim(); ++dim) count *= x.size(dim);
  return count;
}

void check(const at::Tensor& input, int64_t num_groups) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "group_norm: input needs dims [N, C, ...], got ", input.dim());
  TORCH_CHECK_VALUE(num_groups > 0 && input.size(1) % num_groups == 0, "group_norm: ", input.size(1),
                    " channels cannot be divided into ", num_groups, " groups");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm(const at::Tensor& input,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias, int64_t num_groups,
                                                          double eps, const std::vector<std::string>& ranks) {
  check(input, num_groups);
  const at::Tensor x = dense(input);
  const int64_t batches = x.size(0), channels = x.size(1), count = elements_per_group(x, num_groups);
  const Moments each = moments(x);
  const auto by_channel = [&](const at::Tensor& numbers) {
    return numbers.view({batches, num_groups, channels / num_groups}).permute({2, 0, 1});
  };
  const double inner = static_cast<double>(count) / static_cast<double>(channels / num_groups);
  const Moments mine = merge(at::full({channels / num_groups, 1, 1}, inner, each.mean.options()),
                             {by_channel(each.mean), by_channel(each.m2)});
  const auto [all, total] = merge_over({mine.mean.contiguous(), mine.m2.contiguous()}, count, ranks);
  const at::Tensor rstd = all.m2.div(total).add_(eps).rsqrt_();
  at::Tensor scale = to_channels(rstd, channels);
  if (weight) scale = scale.mul(weight->to(at::kDouble));
  const at::Tensor shift = bias ? bias->to(at::kDouble).view({1, -1}) : at::zeros_like(scale);
  const auto type = statistics_type(x.scalar_type());
  return {affine(x, to_channels(all.mean, channels), scale, shift), all.mean.to(type), rstd.to(type)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const at::Tensor& mean, const at::Tensor& rstd, int64_t num_groups, const std::array<bool, 3>& output_mask,
    const std::vector<std::string>& ranks) {
  check(input, num_groups);
  const at::Tensor x = dense(input), dy = grad_output.contiguous(x.suggest_memory_format());
  const int64_t channels = x.size(1);
  const at::Tensor center = to_channels(mean, channels), invstd = to_channels(rstd, channels);
  const auto [sum, dot] = dots(dy, x, center);
  const auto like_weight = [&](const at::Tensor& gradient) {
    return gradient.to(weight ? weight->scalar_type() : statistics_type(x.scalar_type()));
  };
  at::Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[1]) grad_weight = like_weight(dot.mul(invstd).sum(0));
  if (output_mask[2]) grad_bias = like_weight(sum.sum(0));
  if (output_mask[0]) {
    const auto weighed = [&](const at::Tensor& numbers) {
      return to_groups(weight ? numbers.mul(weight->to(at::kDouble)) : numbers, num_groups).view({-1});
    };
    const at::Tensor number = at::full({1}, static_cast<double>(elements_per_group(x, num_groups)), sum.options());
    const at::Tensor sums = at::cat({weighed(sum), weighed(dot), number});
    backend::all_reduce(sums, ranks);
    const int64_t numbers = x.size(0) * num_groups;
    const at::Tensor count = sums.narrow(0, 2 * numbers, 1);
    const auto mean_of = [&](int64_t first) {
      return to_channels(sums.narrow(0, first, numbers).div(count).view({x.size(0), num_groups}), channels);
    };
    const at::Tensor on_dy = weight ? invstd.mul(weight->to(at::kDouble)) : invstd;
    const at::Tensor on_x = invstd.mul(invstd).mul_(invstd).mul_(mean_of(numbers)).neg_();
    grad_input = combine(dy, x, center, on_dy, on_x, invstd.mul(mean_of(0)).neg_());
  }
  return {grad_input, grad_weight, grad_bias};
}

std::array<at::Tensor, 3> group_norm_double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                     const at::Tensor& grad_output, const at::Tensor& input,
                                                     const std::optional<at::Tensor>& weight, const at::Tensor& mean,
                                                     const at::Tensor& rstd, int64_t num_groups,
                                                     const std::vector<std::string>& ranks) {
  const auto type = statistics_type(input.scalar_type());
  const int64_t batches = input.size(0), each = input.size(1) / num_groups;
  int64_t inner = 1;
  for (int64_t dim = 2; dim < input.dim(); ++dim) inner *= input.size(dim);
  const auto elements = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(type).reshape({batches, num_groups, each, inner}) : tensor;
  };
  const auto by_channel = [&](const at::Tensor& row) {
    return row.defined() ? row.to(type).reshape({1, num_groups, each, 1}) : row;
  };
  const auto by_group = [&](const at::Tensor& numbers) { return numbers.to(type).view({batches, num_groups, 1, 1}); };
  auto [for_dy, for_x, for_weight] =
      norm_double_backward({elements(cotangents[0]), by_channel(cotangents[1]), by_channel(cotangents[2])},
                           elements(grad_output), elements(input), weight ? by_channel(*weight) : at::Tensor(),
                           by_group(mean), by_group(rstd), {2, 3}, false, ranks);
  if (weight) for_weight = for_weight.sum(at::IntArrayRef{0, 3}).view({-1}).to(weight->scalar_type());
  return {for_dy.view(input.sizes()).to(grad_output.scalar_type()), for_x.view(input.sizes()).to(input.scalar_type()),
          weight ? for_weight : at::Tensor()};
}

}  // namespace torchtp::spatial
