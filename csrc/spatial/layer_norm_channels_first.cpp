#include "spatial/layer_norm_channels_first.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/zeros.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include "kernels/layer_norm.h"
#include "spatial/checks.h"
#include "spatial/factors.h"
#include "spatial/layer_norm_cuda.h"
#include "spatial/norm.h"
#include "spatial/slab.h"

namespace torchtp::spatial {
namespace {

// Gradients of parameters are summed in this many parts at most, whatever the number of threads.
constexpr int64_t kMaxParts = 16;

using Optional = std::optional<at::Tensor>;

// ATen's layer norm is at its best where the channels lie innermost, and has the kernel for CUDA.
bool atens(const at::Tensor& x) { return !x.is_cpu() || x.suggest_memory_format() != at::MemoryFormat::Contiguous; }

// ATen on the CPU keeps statistics of 16-bit tensors in float if the parameters are float, and gives no gradient for
// parameters that are not there.
at::Tensor atens_factors(const at::Tensor& x, const Optional& numbers, double otherwise) {
  const auto options = x.options().dtype(x.is_cpu() ? statistics_type(x.scalar_type()) : x.scalar_type());
  return numbers ? numbers->to(options.dtype()) : at::full({x.size(1)}, otherwise, options);
}

at::Tensor channels_inner(const at::Tensor& x) { return x.movedim(1, -1); }
// In the layout of `like`, as all other ways answer; a fake tensor has its strides.
at::Tensor channels_first(const at::Tensor& x, const at::Tensor& like) {
  return x.movedim(-1, 1).contiguous(like.suggest_memory_format());
}

std::vector<int64_t> position_sizes(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.erase(sizes.begin() + 1);
  return sizes;
}

}  // namespace

void check_layer_norm_channels_first(const at::Tensor& input, const Optional& weight, const Optional& bias) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "layer_norm_channels_first: input needs dims [N, C, ...], got ", input.dim());
  check_row("layer_norm_channels_first", "weight", weight, input);
  check_row("layer_norm_channels_first", "bias", bias, input);
}

void check_layer_norm_channels_first_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                              const Optional& weight, const at::Tensor& mean, const at::Tensor& rstd) {
  const char* const op = "layer_norm_channels_first_backward";
  TORCH_CHECK_VALUE(input.dim() >= 2, op, ": input needs dims [N, C, ...], got ", input.dim());
  check_row(op, "weight", weight, input);
  check_sizes(op, "grad_output", grad_output, input.sym_sizes(), input);
  c10::SymDimVector positions(input.sym_sizes());
  positions.erase(positions.begin() + 1);
  check_sizes(op, "mean", mean, positions, input);
  check_sizes(op, "rstd", rstd, positions, input);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_channels_first(const at::Tensor& input,
                                                                         const Optional& weight, const Optional& bias,
                                                                         double eps) {
  check_layer_norm_channels_first(input, weight, bias);
  const at::Tensor x = dense(input);
  const auto type = statistics_type(x.scalar_type());
#ifdef TORCHTP_CUDA
  if (has_layer_norm_cuda(x)) return layer_norm_cuda(x, weight, bias, eps);
#endif
  if (atens(x)) {
    auto [y, mean, rstd] = at::native_layer_norm(channels_inner(x), {x.size(1)}, atens_factors(x, weight, 1),
                                                 atens_factors(x, bias, 0), eps);
    return {channels_first(y, x), mean.to(type).view(position_sizes(x)), rstd.to(type).view(position_sizes(x))};
  }
  const at::Tensor y = at::empty_like(x), mean = at::empty(position_sizes(x), x.options().dtype(type)),
                   rstd = at::empty_like(mean);
  const at::Tensor w = factors(weight, type), b = factors(bias, type);
  const auto params = layer_norm_params(x);
  AT_DISPATCH_V2(x.scalar_type(), "layer_norm_channels_first", AT_WRAP([&] {
                   using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
                   at::parallel_for(0, params.num_blocks(), 1, [&](int64_t begin, int64_t end) {
                     kernels::layer_norm_channels_first_cpu(x.const_data_ptr<scalar_t>(), data_or_null<acc_t>(w),
                                                            data_or_null<acc_t>(b), eps, y.mutable_data_ptr<scalar_t>(),
                                                            mean.mutable_data_ptr<acc_t>(),
                                                            rstd.mutable_data_ptr<acc_t>(), params, begin, end);
                   });
                 }),
                 AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16);
  return {y, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_channels_first_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight, const at::Tensor& mean,
    const at::Tensor& rstd, const std::array<bool, 3>& output_mask) {
  check_layer_norm_channels_first_backward(grad_output, input, weight, mean, rstd);
  const at::Tensor x = dense(input), dy = grad_output.contiguous(x.suggest_memory_format());
  const auto type = statistics_type(x.scalar_type());
  const auto like_weight = [&](const at::Tensor& gradient) {
    return gradient.to(weight ? weight->scalar_type() : type);
  };
  at::Tensor grad_input, grad_weight, grad_bias;
#ifdef TORCHTP_CUDA
  if (has_layer_norm_cuda(x)) {
    std::tie(grad_input, grad_weight, grad_bias) = layer_norm_backward_cuda(dy, x, weight, mean, rstd, output_mask);
    if (output_mask[1]) grad_weight = like_weight(grad_weight);
    if (output_mask[2]) grad_bias = like_weight(grad_bias);
    return {grad_input, grad_weight, grad_bias};
  }
#endif
  if (atens(x)) {
    const at::Tensor w = atens_factors(x, weight, 1);
    const at::Tensor m = mean.unsqueeze(-1), r = rstd.unsqueeze(-1);
    // On the CPU ATen adds the gradients of weight and bias up in the type of x.
    const auto summed_in = x.is_cpu() ? type : x.scalar_type();
    std::tie(grad_input, grad_weight, grad_bias) = at::native_layer_norm_backward(
        channels_inner(dy.to(summed_in)), channels_inner(x.to(summed_in)), {x.size(1)}, m, r, w, w, output_mask);
    if (output_mask[0]) grad_input = channels_first(grad_input.to(x.scalar_type()), x);
    if (output_mask[1]) grad_weight = like_weight(grad_weight);
    if (output_mask[2]) grad_bias = like_weight(grad_bias);
    return {grad_input, grad_weight, grad_bias};
  }
  const auto params = layer_norm_params(x);
  const int64_t blocks = params.num_blocks(), parts = std::clamp<int64_t>(blocks / 4, 1, kMaxParts);
  const auto sums = [&](bool wanted) {
    return wanted ? at::zeros({parts, x.size(1)}, x.options().dtype(at::kDouble)) : at::Tensor();
  };
  const at::Tensor sum_weight = sums(output_mask[1]), sum_bias = sums(output_mask[2]), w = factors(weight, type);
  const at::Tensor m = mean.contiguous(), r = rstd.contiguous();
  if (output_mask[0]) grad_input = at::empty_like(x);
  AT_DISPATCH_V2(x.scalar_type(), "layer_norm_channels_first_backward", AT_WRAP([&] {
                   using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
                   const auto part_of = [&](const at::Tensor& sum, int64_t part) {
                     return sum.defined() ? sum.mutable_data_ptr<double>() + part * x.size(1) : nullptr;
                   };
                   at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
                     for (int64_t part = begin; part < end; ++part) {
                       kernels::layer_norm_channels_first_backward_cpu(
                           dy.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), data_or_null<acc_t>(w),
                           m.const_data_ptr<acc_t>(), r.const_data_ptr<acc_t>(),
                           output_mask[0] ? grad_input.mutable_data_ptr<scalar_t>() : nullptr,
                           part_of(sum_weight, part), part_of(sum_bias, part), params, blocks * part / parts,
                           blocks * (part + 1) / parts);
                     }
                   });
                 }),
                 AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16);
  if (output_mask[1]) grad_weight = like_weight(sum_weight.sum(0));
  if (output_mask[2]) grad_bias = like_weight(sum_bias.sum(0));
  return {grad_input, grad_weight, grad_bias};
}

std::array<at::Tensor, 3> layer_norm_channels_first_double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                                    const at::Tensor& grad_output,
                                                                    const at::Tensor& input, const Optional& weight,
                                                                    const at::Tensor& mean, const at::Tensor& rstd) {
  const auto type = statistics_type(input.scalar_type());
  std::vector<int64_t> shape(input.dim(), 1), others{0};
  shape[1] = input.size(1);
  for (int64_t dim = 2; dim < input.dim(); ++dim) others.push_back(dim);
  const auto wide = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(type) : tensor; };
  const auto by_channel = [&](const at::Tensor& row) { return row.defined() ? row.to(type).view(shape) : row; };
  auto [for_dy, for_x, for_weight] = norm_double_backward(
      {wide(cotangents[0]), by_channel(cotangents[1]), by_channel(cotangents[2])}, wide(grad_output), wide(input),
      weight ? by_channel(*weight) : at::Tensor(), mean.unsqueeze(1), rstd.unsqueeze(1), {1}, false, {});
  if (weight) for_weight = for_weight.sum(others).to(weight->scalar_type());
  return {for_dy.to(grad_output.scalar_type()), for_x.to(input.scalar_type()), weight ? for_weight : at::Tensor()};
}

}  // namespace torchtp::spatial
