// torchtp::batch_norm and its backward as dispatcher ops: kernels, shapes for fake tensors, autograd to second order.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/batch_norm.h"
#include "spatial/norm_op.h"

namespace torchtp::spatial::batch_norm_op {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Three batch_norm_kernel(const at::Tensor& input, const Optional& weight, const Optional& bias,
                        const Optional& running_mean, const Optional& running_var, bool training, double momentum,
                        double eps, const Groups& cut_groups) {
  return batch_norm(input, weight, bias, {running_mean, running_var, training, momentum, eps}, cut_groups.vec());
}

Three batch_norm_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                                 const Optional& running_mean, const Optional& running_var, const at::Tensor& save_mean,
                                 const at::Tensor& save_invstd, bool training, double eps,
                                 std::array<bool, 3> output_mask, const Groups& cut_groups) {
  return batch_norm_backward(grad_output, input, weight, save_mean, save_invstd,
                             {running_mean, running_var, training, 0, eps}, output_mask, cut_groups.vec());
}

Three batch_norm_meta(const at::Tensor& input, const Optional& weight, const Optional& bias,
                      const Optional& running_mean, const Optional& running_var, bool training, double momentum,
                      double eps, const Groups&) {
  check_batch_norm(input, weight, bias, {running_mean, running_var, training, momentum, eps});
  const auto options = input.options().dtype(statistics_type(input.scalar_type()));
  const auto saved = [&] { return at::empty_symint({training ? input.sym_size(1) : c10::SymInt(0)}, options); };
  return {at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format()), saved(), saved()};
}

Three batch_norm_backward_meta(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                               const Optional& running_mean, const Optional& running_var, const at::Tensor& save_mean,
                               const at::Tensor& save_invstd, bool training, double eps,
                               std::array<bool, 3> output_mask, const Groups&) {
  check_batch_norm_backward(grad_output, input, weight, save_mean, save_invstd,
                            {running_mean, running_var, training, 0, eps});
  return norm_backward_meta(input, weight, output_mask);
}

const auto& forward_op() {
  static const auto op = typed_op("torchtp::batch_norm", &batch_norm_kernel);
  return op;
}

struct BatchNorm {
  using Args = std::tuple<bool, double, Groups>;  // training, eps, cut_groups
  static constexpr const char* name = "batch_norm";
  // Constants: running_mean, running_var, save_mean, save_invstd.
  static Three backward(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                        const variable_list& constants, const std::array<bool, 3>& mask, const Args& args) {
    static const auto op = typed_op("torchtp::batch_norm_backward", &batch_norm_backward_kernel);
    const auto& [training, eps, cut_groups] = args;
    return op.call(grad_output, input, weight, or_nothing(constants[0]), or_nothing(constants[1]), constants[2],
                   constants[3], training, eps, mask, cut_groups);
  }
  static std::array<at::Tensor, 3> double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                   const at::Tensor& grad_output, const at::Tensor& input,
                                                   const Optional& weight, const variable_list& constants,
                                                   const Args& args) {
    const auto& [training, eps, cut_groups] = args;
    return batch_norm_double_backward(cotangents, grad_output, input, weight, constants[2], constants[3],
                                      {or_nothing(constants[0]), or_nothing(constants[1]), training, 0, eps},
                                      cut_groups.vec());
  }
};

class BatchNormFunction : public torch::autograd::Function<BatchNormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& input, const Optional& weight,
                               const Optional& bias, const Optional& running_mean, const Optional& running_var,
                               bool training, double momentum, double eps, const Groups& cut_groups) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, invstd] =
        forward_op().call(input, weight, bias, running_mean, running_var, training, momentum, eps, cut_groups);
    // In training the running statistics are changed, and not needed.
    const auto kept = [&](const Optional& running) { return training ? at::Tensor() : or_undefined(running); };
    ctx->save_for_backward({input, or_undefined(weight), kept(running_mean), kept(running_var), mean, invstd});
    save_args(ctx, BatchNorm::Args{training, eps, cut_groups}, affine_of(weight, bias));
    ctx->mark_non_differentiable({mean, invstd});
    return {output, mean, invstd};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [args, affine] = load_args<BatchNorm::Args, Affine>(ctx);
    auto [dx, dw, db] = BatchNorm::backward(grads[0], saved[0], or_nothing(saved[1]),
                                            {saved[2], saved[3], saved[4], saved[5]}, affine_mask(ctx, affine), args);
    return {dx, dw, db, {}, {}, {}, {}, {}, {}};
  }
};

Three batch_norm_autograd(const at::Tensor& input, const Optional& weight, const Optional& bias,
                          const Optional& running_mean, const Optional& running_var, bool training, double momentum,
                          double eps, const Groups& cut_groups) {
  if (!needs_graph(input, weight, bias)) {
    return call_below(forward_op(), input, weight, bias, running_mean, running_var, training, momentum, eps,
                      cut_groups);
  }
  auto out =
      BatchNormFunction::apply(input, weight, bias, running_mean, running_var, training, momentum, eps, cut_groups);
  return {out[0], out[1], out[2]};
}

Three batch_norm_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                                   const Optional& running_mean, const Optional& running_var,
                                   const at::Tensor& save_mean, const at::Tensor& save_invstd, bool training,
                                   double eps, std::array<bool, 3> output_mask, const Groups& cut_groups) {
  return norm_backward_autograd<BatchNorm>(
      grad_output, input, weight, {or_undefined(running_mean), or_undefined(running_var), save_mean, save_invstd},
      output_mask, {training, eps, cut_groups});
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

}  // namespace torchtp::spatial::batch_norm_op
