// torchtp::layer_norm_channels_first and its backward as dispatcher ops: kernels, shapes for fake tensors, autograd to
// second order.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/layer_norm_channels_first.h"
#include "spatial/norm_op.h"

namespace torchtp::spatial::layer_norm_channels_first_op {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Three layer_norm_channels_first_kernel(const at::Tensor& input, const Optional& weight, const Optional& bias,
                                       double eps) {
  return layer_norm_channels_first(input, weight, bias, eps);
}

Three layer_norm_channels_first_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                                                const Optional& weight, const at::Tensor& mean, const at::Tensor& rstd,
                                                std::array<bool, 3> output_mask) {
  return layer_norm_channels_first_backward(grad_output, input, weight, mean, rstd, output_mask);
}

Three layer_norm_channels_first_meta(const at::Tensor& input, const Optional& weight, const Optional& bias, double) {
  check_layer_norm_channels_first(input, weight, bias);
  auto sizes = input.sym_sizes().vec();
  sizes.erase(sizes.begin() + 1);
  const auto options = input.options().dtype(statistics_type(input.scalar_type()));
  return {at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format()),
          at::empty_symint(sizes, options), at::empty_symint(sizes, options)};
}

Three layer_norm_channels_first_backward_meta(const at::Tensor& grad_output, const at::Tensor& input,
                                              const Optional& weight, const at::Tensor& mean, const at::Tensor& rstd,
                                              std::array<bool, 3> output_mask) {
  check_layer_norm_channels_first_backward(grad_output, input, weight, mean, rstd);
  return norm_backward_meta(input, weight, output_mask);
}

const auto& forward_op() {
  static const auto op = typed_op("torchtp::layer_norm_channels_first", &layer_norm_channels_first_kernel);
  return op;
}

struct LayerNorm {
  using Args = std::tuple<>;
  static constexpr const char* name = "layer_norm_channels_first";
  // Constants: mean, rstd.
  static Three backward(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                        const variable_list& constants, const std::array<bool, 3>& mask, const Args&) {
    static const auto op =
        typed_op("torchtp::layer_norm_channels_first_backward", &layer_norm_channels_first_backward_kernel);
    return op.call(grad_output, input, weight, constants[0], constants[1], mask);
  }
  static std::array<at::Tensor, 3> double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                   const at::Tensor& grad_output, const at::Tensor& input,
                                                   const Optional& weight, const variable_list& constants,
                                                   const Args&) {
    return layer_norm_channels_first_double_backward(cotangents, grad_output, input, weight, constants[0],
                                                     constants[1]);
  }
};

class LayerNormChannelsFirstFunction : public torch::autograd::Function<LayerNormChannelsFirstFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& input, const Optional& weight,
                               const Optional& bias, double eps) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, rstd] = forward_op().call(input, weight, bias, eps);
    ctx->save_for_backward({input, or_undefined(weight), mean, rstd});
    save_args(ctx, affine_of(weight, bias));
    ctx->mark_non_differentiable({mean, rstd});
    return {output, mean, rstd};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [affine] = load_args<Affine>(ctx);
    auto [dx, dw, db] = LayerNorm::backward(grads[0], saved[0], or_nothing(saved[1]), {saved[2], saved[3]},
                                            affine_mask(ctx, affine), {});
    return {dx, dw, db, {}};
  }
};

Three layer_norm_channels_first_autograd(const at::Tensor& input, const Optional& weight, const Optional& bias,
                                         double eps) {
  if (!needs_graph(input, weight, bias)) return call_below(forward_op(), input, weight, bias, eps);
  auto out = LayerNormChannelsFirstFunction::apply(input, weight, bias, eps);
  return {out[0], out[1], out[2]};
}

Three layer_norm_channels_first_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input,
                                                  const Optional& weight, const at::Tensor& mean,
                                                  const at::Tensor& rstd, std::array<bool, 3> output_mask) {
  return norm_backward_autograd<LayerNorm>(grad_output, input, weight, {mean, rstd}, output_mask, {});
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

}  // namespace torchtp::spatial::layer_norm_channels_first_op
