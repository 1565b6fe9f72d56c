#include "spatial/batch_norm.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "backend/reduce.h"
#include "spatial/checks.h"
#include "spatial/norm.h"
#include "spatial/norm_cuda.h"
#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

int64_t elements_per_channel(const at::Tensor& x) {
  int64_t count = x.size(0);
  for (int64_t dim = 2; dim < x.dim(); ++dim) count *= x.size(dim);
  return count;
}

void check(const char* op, const at::Tensor& input, const std::optional<at::Tensor>& weight,
           const BatchNormParams& params) {
  TORCH_CHECK_VALUE(input.dim() >= 2, op, ": input needs dims [N, C, ...], got ", input.dim());
  TORCH_CHECK_VALUE(params.training || (params.running_mean && params.running_var), op,
                    ": without training it needs running_mean and running_var");
  check_row(op, "weight", weight, input);
  check_row(op, "running_mean", params.running_mean, input);
  check_row(op, "running_var", params.running_var, input);
}

struct Statistics {
  Numbers mean, invstd;  // [1, C]
};

Statistics statistics(const at::Tensor& save_mean, const at::Tensor& save_invstd, const BatchNormParams& params) {
  if (params.training) return {Numbers(save_mean), Numbers(save_invstd)};
  return {Numbers(*params.running_mean),
          map([&](const auto& var) { return inverse_root(var + params.eps); }, Numbers(*params.running_var))};
}

Numbers zeros_like(const Numbers& numbers) { return Numbers::filled(1, 1, 0, numbers); }

}  // namespace

void check_batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, const BatchNormParams& params) {
  check("batch_norm", input, weight, params);
  check_row("batch_norm", "bias", bias, input);
}

void check_batch_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                               const std::optional<at::Tensor>& weight, const at::Tensor& save_mean,
                               const at::Tensor& save_invstd, const BatchNormParams& params) {
  const char* const op = "batch_norm_backward";
  BatchNormParams used = params;
  if (params.training) used.running_mean = used.running_var = std::nullopt;
  check(op, input, weight, used);
  check_sizes(op, "grad_output", grad_output, input.sym_sizes(), input);
  if (!params.training) return;
  check_row(op, "save_mean", save_mean, input);
  check_row(op, "save_invstd", save_invstd, input);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          const BatchNormParams& params,
                                                          const std::vector<std::string>& cut_groups) {
  check_batch_norm(input, weight, bias, params);
  const at::Tensor x = dense(input);
#ifdef TORCHTP_CUDA
  if (has_cuda_kernels(x)) return batch_norm_cuda(x, weight, bias, params, cut_groups);
#endif
  const auto type = statistics_type(x.scalar_type());
  Statistics stats;
  at::Tensor save_mean, save_invstd;
  if (params.training) {
    Moments mine = moments(x);
    if (x.size(0) != 1) {
      const auto each = static_cast<double>(x.size(0) == 0 ? 0 : elements_per_channel(x) / x.size(0));
      mine = merge(Numbers::filled(x.size(0), 1, each, mine.mean), mine);
    }
    const auto [all, count] = merge_over(mine, elements_per_channel(x), cut_groups);
    stats = {all.mean,
             map([&](const auto& m2, const auto& n) { return inverse_root(m2 / at_least(n, 1) + params.eps); }, all.m2,
                 count)};
    save_mean = stats.mean.to_tensor(type, {stats.mean.size()});
    save_invstd = stats.invstd.to_tensor(type, {stats.invstd.size()});
    // Like ATen: a batch of nothing, on all ranks, leaves the running statistics as they are.
    const Numbers momentum = map([&](const auto& n) { return at_least(-n, -1) * -params.momentum; }, count);
    const auto update = [&](const at::Tensor& running, const Numbers& now) {
      map([](const auto& a, const auto& b, const auto& share) { return a * (1 - share) + b * share; }, Numbers(running),
          now, momentum)
          .write(running);
    };
    if (params.running_mean) update(*params.running_mean, all.mean);
    if (params.running_var) {
      update(*params.running_var, map([](const auto& m2, const auto& n) { return m2 / (n - 1); }, all.m2, count));
    }
  } else {
    stats = statistics(save_mean, save_invstd, params);
    save_mean = at::empty({0}, x.options().dtype(type));
    save_invstd = at::empty({0}, x.options().dtype(type));
  }
  const Numbers scale = weight ? product(stats.invstd, Numbers(*weight)) : stats.invstd;
  const Numbers shift = bias ? Numbers(*bias) : zeros_like(stats.mean);
  return {affine(x, stats.mean, scale, shift), save_mean, save_invstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const at::Tensor& save_mean, const at::Tensor& save_invstd, const BatchNormParams& params,
    const std::array<bool, 3>& output_mask, const std::vector<std::string>& cut_groups) {
  check_batch_norm_backward(grad_output, input, weight, save_mean, save_invstd, params);
  const at::Tensor x = dense(input), dy = grad_output.contiguous(x.suggest_memory_format());
#ifdef TORCHTP_CUDA
  if (has_cuda_kernels(x)) {
    return batch_norm_backward_cuda(dy, x, weight, save_mean, save_invstd, params, output_mask, cut_groups);
  }
#endif
  const Statistics stats = statistics(save_mean, save_invstd, params);
  const Numbers on_dy = weight ? product(stats.invstd, Numbers(*weight)) : stats.invstd;
  at::Tensor grad_input, grad_weight, grad_bias;
  if (!params.training && output_mask[0]) grad_input = affine(dy, zeros_like(on_dy), on_dy, zeros_like(on_dy));
  if (!params.training && !output_mask[1] && !output_mask[2]) return {grad_input, grad_weight, grad_bias};

  const auto [sums, dots_with_x] = dots(dy, x, stats.mean);
  const Numbers sum = sums.sum_rows(), dot = dots_with_x.sum_rows();
  const auto type = weight ? weight->scalar_type() : statistics_type(x.scalar_type());
  if (output_mask[1]) grad_weight = product(dot, stats.invstd).to_tensor(type, {dot.size()});
  if (output_mask[2]) grad_bias = sum.to_tensor(type, {sum.size()});
  if (!params.training || !output_mask[0]) return {grad_input, grad_weight, grad_bias};

  const int64_t channels = x.size(1);
  const Numbers number = Numbers::filled(1, 1, static_cast<double>(elements_per_channel(x)), sum);
  const at::Tensor message = Numbers::join({sum, dot, number}).to_tensor(at::kDouble, {2 * channels + 1});
  backend::all_reduce(message, cut_groups);
  const Numbers all(message), count = all.columns(2 * channels, 1);
  const Numbers mean_dy = quotient(all.columns(0, channels), count),
                mean_dot = quotient(all.columns(channels, channels), count);
  const Numbers on_x =
      map([](const auto& a, const auto& invstd, const auto& dot) { return -(a * invstd * invstd * dot); }, on_dy,
          stats.invstd, mean_dot);
  const Numbers shift = map([](const auto& a, const auto& b) { return -(a * b); }, on_dy, mean_dy);
  return {combine(dy, x, stats.mean, on_dy, on_x, shift), grad_weight, grad_bias};
}

std::array<at::Tensor, 3> batch_norm_double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                     const at::Tensor& grad_output, const at::Tensor& input,
                                                     const std::optional<at::Tensor>& weight,
                                                     const at::Tensor& save_mean, const at::Tensor& save_invstd,
                                                     const BatchNormParams& params,
                                                     const std::vector<std::string>& cut_groups) {
  const auto type = statistics_type(input.scalar_type());
  std::vector<int64_t> shape(input.dim(), 1), dims{0};
  shape[1] = input.size(1);
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  const auto wide = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(type) : tensor; };
  const auto broadcast = [&](const at::Tensor& row) { return row.defined() ? row.to(type).view(shape) : row; };
  const Statistics stats = statistics(save_mean, save_invstd, params);
  auto [for_dy, for_x, for_weight] =
      norm_double_backward({wide(cotangents[0]), broadcast(cotangents[1]), broadcast(cotangents[2])}, wide(grad_output),
                           wide(input), weight ? broadcast(*weight) : at::Tensor(), stats.mean.to_tensor(type, shape),
                           stats.invstd.to_tensor(type, shape), dims, !params.training, cut_groups);
  if (weight) for_weight = for_weight.sum(dims).to(weight->scalar_type());
  return {for_dy.to(grad_output.scalar_type()), for_x.to(input.scalar_type()), weight ? for_weight : at::Tensor()};
}

}  // namespace torchtp::spatial
