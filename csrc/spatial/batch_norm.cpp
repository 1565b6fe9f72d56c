#include "spatial/batch_norm.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include "backend/reduce.h"
#include "spatial/norm.h"
#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

// [1, C] in float64.
at::Tensor row(const at::Tensor& numbers) { return numbers.to(at::kDouble).view({1, -1}); }

at::Tensor weight_row(const std::optional<at::Tensor>& weight, const at::Tensor& like) {
  return weight ? row(*weight) : at::ones_like(like);
}

int64_t elements_per_channel(const at::Tensor& x) {
  int64_t count = x.size(0);
  for (int64_t dim = 2; dim < x.dim(); ++dim) count *= x.size(dim);
  return count;
}

void check(const at::Tensor& input, const BatchNormParams& params) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "batch_norm: input needs dims [N, C, ...], got ", input.dim());
  TORCH_CHECK_VALUE(params.training || (params.running_mean && params.running_var),
                    "batch_norm: without training it needs running_mean and running_var");
}

struct Statistics {
  at::Tensor mean, invstd;  // [1, C], float64
};

Statistics statistics(const at::Tensor& save_mean, const at::Tensor& save_invstd, const BatchNormParams& params) {
  if (params.training) return {row(save_mean), row(save_invstd)};
  return {row(*params.running_mean), row(*params.running_var).add(params.eps).rsqrt_()};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          const BatchNormParams& params,
                                                          const std::vector<std::string>& groups) {
  check(input, params);
  const at::Tensor x = dense(input);
  const auto saved_options = x.options().dtype(statistics_type(x.scalar_type()));
  Statistics stats;
  at::Tensor save_mean = at::empty({0}, saved_options), save_invstd = at::empty({0}, saved_options);
  if (params.training) {
    Moments mine = moments(x);
    if (x.size(0) != 1) {
      const auto each = static_cast<double>(x.size(0) == 0 ? 0 : elements_per_channel(x) / x.size(0));
      mine = merge(at::full({x.size(0), 1}, each, mine.mean.options()), mine);
    }
    const auto [all, count] = merge_over(mine, elements_per_channel(x), groups);
    stats = {all.mean.view({1, -1}), all.m2.div(count).add_(params.eps).rsqrt_().view({1, -1})};
    save_mean = stats.mean.view({-1}).to(saved_options.dtype());
    save_invstd = stats.invstd.view({-1}).to(saved_options.dtype());
    const auto update = [&](const at::Tensor& running, const at::Tensor& now) {
      running.mul_(1 - params.momentum).add_(now.view({-1}).to(running.scalar_type()), params.momentum);
    };
    if (params.running_mean) update(*params.running_mean, all.mean);
    if (params.running_var) update(*params.running_var, all.m2.div(count.sub(1)));
  } else {
    stats = statistics(save_mean, save_invstd, params);
  }
  const at::Tensor scale = weight ? stats.invstd.mul(row(*weight)) : stats.invstd;
  const at::Tensor shift = bias ? row(*bias) : at::zeros_like(stats.mean);
  return {affine(x, stats.mean, scale, shift), save_mean, save_invstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const at::Tensor& save_mean, const at::Tensor& save_invstd, const BatchNormParams& params,
    const std::array<bool, 3>& output_mask, const std::vector<std::string>& groups) {
  check(input, params);
  const at::Tensor x = dense(input), dy = grad_output.contiguous(x.suggest_memory_format());
  const Statistics stats = statistics(save_mean, save_invstd, params);
  const at::Tensor on_dy = weight ? stats.invstd.mul(row(*weight)) : stats.invstd;
  at::Tensor grad_input, grad_weight, grad_bias;
  if (!params.training && !output_mask[1] && !output_mask[2]) {
    const at::Tensor zero = at::zeros_like(on_dy);
    if (output_mask[0]) grad_input = affine(dy, zero, on_dy, zero);
    return {grad_input, grad_weight, grad_bias};
  }
  auto [sum, dot] = dots(dy, x, stats.mean);
  sum = sum.sum(0, true);
  dot = dot.sum(0, true);
  const auto like_weight = [&](const at::Tensor& gradient) {
    return gradient.view({-1}).to(weight ? weight->scalar_type() : statistics_type(x.scalar_type()));
  };
  if (output_mask[1]) grad_weight = like_weight(dot.mul(stats.invstd));
  if (output_mask[2]) grad_bias = like_weight(sum);
  if (!output_mask[0]) return {grad_input, grad_weight, grad_bias};
  if (!params.training) {
    const at::Tensor zero = at::zeros_like(on_dy);
    return {affine(dy, zero, on_dy, zero), grad_weight, grad_bias};
  }
  const int64_t channels = x.size(1);
  const at::Tensor number = at::full({1, 1}, static_cast<double>(elements_per_channel(x)), sum.options());
  const at::Tensor sums = at::cat({sum, dot, number}, 1).view({-1});
  backend::all_reduce(sums, groups);
  const at::Tensor count = sums.narrow(0, 2 * channels, 1);
  const at::Tensor mean_dy = sums.narrow(0, 0, channels).div(count),
                   mean_dot = sums.narrow(0, channels, channels).div(count);
  const at::Tensor on_x = on_dy.mul(stats.invstd).mul_(stats.invstd).mul_(mean_dot).neg_();
  return {combine(dy, x, stats.mean, on_dy, on_x, on_dy.mul(mean_dy).neg_()), grad_weight, grad_bias};
}

std::array<at::Tensor, 3> batch_norm_double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                     const at::Tensor& grad_output, const at::Tensor& input,
                                                     const std::optional<at::Tensor>& weight,
                                                     const at::Tensor& save_mean, const at::Tensor& save_invstd,
                                                     const BatchNormParams& params,
                                                     const std::vector<std::string>& groups) {
  const auto type = statistics_type(input.scalar_type());
  std::vector<int64_t> shape(input.dim(), 1), dims{0};
  shape[1] = input.size(1);
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  const auto wide = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(type) : tensor; };
  const auto broadcast = [&](const at::Tensor& row) { return row.defined() ? row.to(type).view(shape) : row; };
  const Statistics stats = statistics(save_mean, save_invstd, params);
  auto [for_dy, for_x, for_weight] =
      norm_double_backward({wide(cotangents[0]), broadcast(cotangents[1]), broadcast(cotangents[2])}, wide(grad_output),
                           wide(input), weight ? broadcast(*weight) : at::Tensor(), broadcast(stats.mean),
                           broadcast(stats.invstd), dims, !params.training, groups);
  if (weight) for_weight = for_weight.sum(dims).to(weight->scalar_type());
  return {for_dy.to(grad_output.scalar_type()), for_x.to(input.scalar_type()), weight ? for_weight : at::Tensor()};
}

}  // namespace torchtp::spatial
