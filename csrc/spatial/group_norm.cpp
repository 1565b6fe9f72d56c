#include "spatial/group_norm.h"

#include <c10/util/Exception.h>

#include "backend/reduce.h"
#include "spatial/checks.h"
#include "spatial/norm.h"
#include "spatial/norm_cuda.h"
#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

int64_t elements_per_group(const at::Tensor& x, int64_t num_groups) {
  int64_t count = x.size(1) / num_groups;
  for (int64_t dim = 2; dim < x.dim(); ++dim) count *= x.size(dim);
  return count;
}

void check(const char* op, const at::Tensor& input, const std::optional<at::Tensor>& weight, int64_t num_groups) {
  TORCH_CHECK_VALUE(input.dim() >= 2, op, ": input needs dims [N, C, ...], got ", input.dim());
  TORCH_CHECK_VALUE(num_groups > 0 && input.sym_size(1) % num_groups == 0, op, ": ", input.sym_size(1),
                    " channels cannot be divided into ", num_groups, " groups");
  check_row(op, "weight", weight, input);
}

}  // namespace

void check_group_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, int64_t num_groups) {
  check("group_norm", input, weight, num_groups);
  check_row("group_norm", "bias", bias, input);
}

void check_group_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                               const std::optional<at::Tensor>& weight, const at::Tensor& mean, const at::Tensor& rstd,
                               int64_t num_groups) {
  const char* const op = "group_norm_backward";
  check(op, input, weight, num_groups);
  check_sizes(op, "grad_output", grad_output, input.sym_sizes(), input);
  const c10::SymInt statistics[] = {input.sym_size(0), num_groups};
  check_sizes(op, "mean", mean, statistics, input);
  check_sizes(op, "rstd", rstd, statistics, input);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm(const at::Tensor& input,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias, int64_t num_groups,
                                                          double eps, const std::vector<std::string>& cut_groups) {
  check_group_norm(input, weight, bias, num_groups);
  const at::Tensor x = dense(input);
#ifdef TORCHTP_CUDA
  if (has_cuda_kernels(x)) return group_norm_cuda(x, weight, bias, num_groups, eps, cut_groups);
#endif
  const int64_t batches = x.size(0), members = x.size(1) / num_groups, count = elements_per_group(x, num_groups);
  const Moments each = moments(x);
  const double inner = static_cast<double>(count) / static_cast<double>(members);
  const Moments mine = merge(Numbers::filled(members, 1, inner, each.mean),
                             {each.mean.by_member(num_groups), each.m2.by_member(num_groups)});
  const auto [all, total] = merge_over(mine, count, cut_groups);
  const Numbers mean = all.mean.view(batches, num_groups);
  const Numbers rstd = map([&](const auto& m2, const auto& n) { return inverse_root(m2 / n + eps); }, all.m2, total)
                           .view(batches, num_groups);
  Numbers scale = rstd.repeat_for_members(members);
  if (weight) scale = product(scale, Numbers(*weight));
  const Numbers shift = bias ? Numbers(*bias) : Numbers::filled(1, 1, 0, scale);
  const auto type = statistics_type(x.scalar_type());
  const std::vector<int64_t> sizes{batches, num_groups};
  return {affine(x, mean.repeat_for_members(members), scale, shift), mean.to_tensor(type, sizes),
          rstd.to_tensor(type, sizes)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const at::Tensor& mean, const at::Tensor& rstd, int64_t num_groups, const std::array<bool, 3>& output_mask,
    const std::vector<std::string>& cut_groups) {
  check_group_norm_backward(grad_output, input, weight, mean, rstd, num_groups);
  const at::Tensor x = dense(input), dy = grad_output.contiguous(x.suggest_memory_format());
#ifdef TORCHTP_CUDA
  if (has_cuda_kernels(x))
    return group_norm_backward_cuda(dy, x, weight, mean, rstd, num_groups, output_mask, cut_groups);
#endif
  const int64_t batches = x.size(0), channels = x.size(1), members = channels / num_groups;
  const Numbers center = Numbers(mean).repeat_for_members(members), invstd = Numbers(rstd).repeat_for_members(members);
  const auto [sum, dot] = dots(dy, x, center);
  const auto type = weight ? weight->scalar_type() : statistics_type(x.scalar_type());
  at::Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[1]) grad_weight = product(dot, invstd).sum_rows().to_tensor(type, {channels});
  if (output_mask[2]) grad_bias = sum.sum_rows().to_tensor(type, {channels});
  if (output_mask[0]) {
    const int64_t numbers = batches * num_groups;
    const auto weighed = [&](const Numbers& all) {
      return (weight ? product(all, Numbers(*weight)) : all).sum_members(num_groups).view(1, numbers);
    };
    const Numbers number = Numbers::filled(1, 1, static_cast<double>(elements_per_group(x, num_groups)), sum);
    const at::Tensor message =
        Numbers::join({weighed(sum), weighed(dot), number}).to_tensor(at::kDouble, {2 * numbers + 1});
    backend::all_reduce(message, cut_groups);
    const Numbers all(message), count = all.columns(2 * numbers, 1);
    const auto mean_of = [&](int64_t first) {
      return quotient(all.columns(first, numbers), count).view(batches, num_groups).repeat_for_members(members);
    };
    const Numbers on_dy = weight ? product(invstd, Numbers(*weight)) : invstd;
    const Numbers on_x =
        map([](const auto& a, const auto& dot) { return -(a * a * a * dot); }, invstd, mean_of(numbers));
    const Numbers shift = map([](const auto& a, const auto& b) { return -(a * b); }, invstd, mean_of(0));
    grad_input = combine(dy, x, center, on_dy, on_x, shift);
  }
  return {grad_input, grad_weight, grad_bias};
}

std::array<at::Tensor, 3> group_norm_double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                     const at::Tensor& grad_output, const at::Tensor& input,
                                                     const std::optional<at::Tensor>& weight, const at::Tensor& mean,
                                                     const at::Tensor& rstd, int64_t num_groups,
                                                     const std::vector<std::string>& cut_groups) {
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
                           by_group(mean), by_group(rstd), {2, 3}, false, cut_groups);
  if (weight) for_weight = for_weight.sum(at::IntArrayRef{0, 3}).view({-1}).to(weight->scalar_type());
  return {for_dy.view(input.sizes()).to(grad_output.scalar_type()), for_x.view(input.sizes()).to(input.scalar_type()),
          weight ? for_weight : at::Tensor()};
}

}  // namespace torchtp::spatial
