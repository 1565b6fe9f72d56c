// torchtp::batch_norm and its backward as dispatcher ops: kernels, shapes for fake tensors, autograd to second order.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "spatial/batch_norm.h"
#include "spatial/norm.h"
#include "spatial/op.h"

namespace torchtp::spatial {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Optional = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Three batch_norm_kernel(const at::Tensor& input, const Optional& weight, const Optional& bias,
                        const Optional& running_mean, const Optional& running_var, bool training, double momentum,
                        double eps, const Groups& groups) {
  return batch_norm(input, weight, bias, {running_mean, running_var, training, momentum, eps}, groups.vec());
}

Three batch_norm_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                                 const Optional& running_mean, const Optional& running_var, const at::Tensor& save_mean,
                                 const at::Tensor& save_invstd, bool training, double eps,
                                 std::array<bool, 3> output_mask, const Groups& groups) {
  return batch_norm_backward(grad_output, input, weight, save_mean, save_invstd,
                             {running_mean, running_var, training, 0, eps}, output_mask, groups.vec());
}

Three batch_norm_meta(const at::Tensor& input, const Optional&, const Optional&, const Optional&, const Optional&,
                      bool training, double, double, const Groups&) {
  const auto options = input.options().dtype(statistics_type(input.scalar_type()));
  const auto saved = [&] { return at::empty_symint({training ? input.sym_size(1) : c10::SymInt(0)}, options); };
  return {at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format()), saved(), saved()};
}

Three batch_norm_backward_meta(const at::Tensor&, const at::Tensor& input, const Optional& weight, const Optional&,
                               const Optional&, const at::Tensor&, const at::Tensor&, bool, double,
                               std::array<bool, 3> output_mask, const Groups&) {
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
                    const Optional& running_mean, const Optional& running_var, const at::Tensor& save_mean,
                    const at::Tensor& save_invstd, bool training, double eps, std::array<bool, 3> mask,
                    const Groups& groups) {
  static const auto op = typed_op("torchtp::batch_norm_backward", &batch_norm_backward_kernel);
  return op.call(grad_output, input, weight, running_mean, running_var, save_mean, save_invstd, training, eps, mask,
                 groups);
}

using Args = std::tuple<bool, double, Groups>;  // training, eps, groups

class BatchNormFunction : public torch::autograd::Function<BatchNormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& input, const Optional& weight,
                               const Optional& bias, const Optional& running_mean, const Optional& running_var,
                               bool training, double momentum, double eps, const Groups& groups) {
    static const auto op = typed_op("torchtp::batch_norm", &batch_norm_kernel);
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, invstd] =
        op.call(input, weight, bias, running_mean, running_var, training, momentum, eps, groups);
    // In training the running statistics are changed, and not needed.
    const auto kept = [&](const Optional& running) { return training ? at::Tensor() : or_undefined(running); };
    ctx->save_for_backward({input, or_undefined(weight), kept(running_mean), kept(running_var), mean, invstd});
    save_args(ctx, Args{training, eps, groups});
    save_affine(ctx, weight, bias);
    ctx->mark_non_differentiable({mean, invstd});
    return {output, mean, invstd};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [training, eps, groups] = load_args<Args>(ctx);
    auto [dx, dw, db] =
        call_backward(grads[0], saved[0], or_nothing(saved[1]), or_nothing(saved[2]), or_nothing(saved[3]), saved[4],
                      saved[5], training, eps, affine_mask(ctx), groups);
    return {dx, dw, db, {}, {}, {}, {}, {}, {}};
  }
};

class BatchNormBackwardFunction : public torch::autograd::Function<BatchNormBackwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& grad_output, const Variable& input,
                               const Optional& weight, const Optional& running_mean, const Optional& running_var,
                               const Variable& save_mean, const Variable& save_invstd, bool training, double eps,
                               std::array<bool, 3> mask, const Groups& groups) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({grad_output, input, or_undefined(weight), or_undefined(running_mean),
                            or_undefined(running_var), save_mean, save_invstd});
    ctx->set_materialize_grads(false);
    save_args(ctx, Args{training, eps, groups});
    return masked_outputs(ctx,
                          call_backward(grad_output, input, weight, running_mean, running_var, save_mean, save_invstd,
                                        training, eps, mask, groups),
                          mask);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list s = ctx->get_saved_variables();
    const auto [training, eps, groups] = load_args<Args>(ctx);
    std::array<at::Tensor, 3> out;
    {
      at::NoGradGuard no_grad;
      out = batch_norm_double_backward(cotangents(ctx, grads), s[0], s[1], or_nothing(s[2]), s[5], s[6],
                                       {or_nothing(s[3]), or_nothing(s[4]), training, 0, eps}, groups.vec());
    }
    variable_list all(11);
    std::copy(out.begin(), out.end(), all.begin());
    return last_derivative("batch_norm", all);
  }
};

Three batch_norm_autograd(const at::Tensor& input, const Optional& weight, const Optional& bias,
                          const Optional& running_mean, const Optional& running_var, bool training, double momentum,
                          double eps, const Groups& groups) {
  auto out = BatchNormFunction::apply(input, weight, bias, running_mean, running_var, training, momentum, eps, groups);
  return {out[0], out[1], out[2]};
}

Three batch_norm_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                                   const Optional& running_mean, const Optional& running_var,
                                   const at::Tensor& save_mean, const at::Tensor& save_invstd, bool training,
                                   double eps, std::array<bool, 3> output_mask, const Groups& groups) {
  const auto all = unmask(BatchNormBackwardFunction::apply(grad_output, input, weight, running_mean, running_var,
                                                           save_mean, save_invstd, training, eps, output_mask, groups),
                          output_mask);
  return {all[0], all[1], all[2]};
}

void register_kernels(torch::Library& m) {
  m.impl("batch_norm", batch_norm_kernel);
  m.impl("batch_norm_backward", batch_norm_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("batch_norm", batch_norm_meta);
  m.impl("batch_norm_backward", batch_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("batch_norm", batch_norm_autograd);
  m.impl("batch_norm_backward", batch_norm_backward_autograd);
}

}  // namespace torchtp::spatial
