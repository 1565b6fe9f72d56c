// torchtp::layer_norm_channels_first and its backward as dispatcher ops: kernels, shapes for fake tensors, autograd to
// second order.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/layer_norm_channels_first.h"
#include "spatial/norm.h"
#include "spatial/op.h"

namespace torchtp::spatial {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Optional = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Three layer_norm_channels_first_kernel(const at::Tensor& input, const Optional& weight, const Optional& bias,
                                       double eps) {
  return layer_norm_channels_first(input, weight, bias, eps);
}

Three layer_norm_channels_first_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                                                const Optional& weight, const at::Tensor& mean, const at::Tensor& rstd,
                                                std::array<bool, 3> output_mask) {
  return layer_norm_channels_first_backward(grad_output, input, weight, mean, rstd, output_mask);
}

Three layer_norm_channels_first_meta(const at::Tensor& input, const Optional&, const Optional&, double) {
  auto sizes = input.sym_sizes().vec();
  sizes.erase(sizes.begin() + 1);
  const auto options = input.options().dtype(statistics_type(input.scalar_type()));
  return {at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format()),
          at::empty_symint(sizes, options), at::empty_symint(sizes, options)};
}

Three layer_norm_channels_first_backward_meta(const at::Tensor&, const at::Tensor& input, const Optional& weight,
                                              const at::Tensor&, const at::Tensor&, std::array<bool, 3> output_mask) {
  const auto options = input.options().dtype(weight ? weight->scalar_type() : statistics_type(input.scalar_type()));
  at::Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) {
    grad_input = at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format());
  }
  if (output_mask[1]) grad_weight = at::empty_symint({input.sym_size(1)}, options);
  if (output_mask[2]) grad_bias = at::empty_symint({input.sym_size(1)}, options);
  return {grad_input, grad_weight, grad_bias};
}

Three call_backward(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                    const at::Tensor& mean, const at::Tensor& rstd, std::array<bool, 3> mask) {
  static const auto op =
      typed_op("torchtp::layer_norm_channels_first_backward", &layer_norm_channels_first_backward_kernel);
  return op.call(grad_output, input, weight, mean, rstd, mask);
}

class LayerNormChannelsFirstFunction : public torch::autograd::Function<LayerNormChannelsFirstFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& input, const Optional& weight,
                               const Optional& bias, double eps) {
    static const auto op = typed_op("torchtp::layer_norm_channels_first", &layer_norm_channels_first_kernel);
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, rstd] = op.call(input, weight, bias, eps);
    ctx->save_for_backward({input, or_undefined(weight), mean, rstd});
    save_affine(ctx, weight, bias);
    ctx->mark_non_differentiable({mean, rstd});
    return {output, mean, rstd};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dx, dw, db] = call_backward(grads[0], saved[0], or_nothing(saved[1]), saved[2], saved[3], affine_mask(ctx));
    return {dx, dw, db, {}};
  }
};

class LayerNormChannelsFirstBackwardFunction
    : public torch::autograd::Function<LayerNormChannelsFirstBackwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& grad_output, const Variable& input,
                               const Optional& weight, const Variable& mean, const Variable& rstd,
                               std::array<bool, 3> mask) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({grad_output, input, or_undefined(weight), mean, rstd});
    ctx->set_materialize_grads(false);
    return masked_outputs(ctx, call_backward(grad_output, input, weight, mean, rstd, mask), mask);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list s = ctx->get_saved_variables();
    std::array<at::Tensor, 3> out;
    {
      at::NoGradGuard no_grad;
      out = layer_norm_channels_first_double_backward(cotangents(ctx, grads), s[0], s[1], or_nothing(s[2]), s[3], s[4]);
    }
    variable_list all(6);
    std::copy(out.begin(), out.end(), all.begin());
    return last_derivative("layer_norm_channels_first", all);
  }
};

Three layer_norm_channels_first_autograd(const at::Tensor& input, const Optional& weight, const Optional& bias,
                                         double eps) {
  auto out = LayerNormChannelsFirstFunction::apply(input, weight, bias, eps);
  return {out[0], out[1], out[2]};
}

Three layer_norm_channels_first_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input,
                                                  const Optional& weight, const at::Tensor& mean,
                                                  const at::Tensor& rstd, std::array<bool, 3> output_mask) {
  const auto all = unmask(
      LayerNormChannelsFirstBackwardFunction::apply(grad_output, input, weight, mean, rstd, output_mask), output_mask);
  return {all[0], all[1], all[2]};
}

void register_kernels(torch::Library& m) {
  m.impl("layer_norm_channels_first", layer_norm_channels_first_kernel);
  m.impl("layer_norm_channels_first_backward", layer_norm_channels_first_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("layer_norm_channels_first", layer_norm_channels_first_meta);
  m.impl("layer_norm_channels_first_backward", layer_norm_channels_first_backward_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("layer_norm_channels_first", layer_norm_channels_first_autograd);
  m.impl("layer_norm_channels_first_backward", layer_norm_channels_first_backward_autograd);
}

}  // namespace torchtp::spatial
