// torchtp::group_norm and its backward as dispatcher ops: kernels, shapes for fake tensors, autograd to second order.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/group_norm.h"
#include "spatial/norm.h"
#include "spatial/op.h"

namespace torchtp::spatial {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Optional = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Three group_norm_kernel(const at::Tensor& input, const Optional& weight, const Optional& bias, int64_t num_groups,
                        double eps, const Groups& ranks) {
  return group_norm(input, weight, bias, num_groups, eps, ranks.vec());
}

Three group_norm_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                                 const at::Tensor& mean, const at::Tensor& rstd, int64_t num_groups,
                                 std::array<bool, 3> output_mask, const Groups& ranks) {
  return group_norm_backward(grad_output, input, weight, mean, rstd, num_groups, output_mask, ranks.vec());
}

Three group_norm_meta(const at::Tensor& input, const Optional&, const Optional&, int64_t num_groups, double,
                      const Groups&) {
  const std::vector<c10::SymInt> sizes{input.sym_size(0), num_groups};
  const auto options = input.options().dtype(statistics_type(input.scalar_type()));
  return {at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format()),
          at::empty_symint(sizes, options), at::empty_symint(sizes, options)};
}

Three group_norm_backward_meta(const at::Tensor&, const at::Tensor& input, const Optional& weight, const at::Tensor&,
                               const at::Tensor&, int64_t, std::array<bool, 3> output_mask, const Groups&) {
  const auto options = input.options().dtype(weight ? weight->scalar_type() : statistics_type(input.scalar_type()));
  at::Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) {
    grad_input = at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format());
  }
  if (output_mask[1]) grad_weight = at::empty_symint({input.sym_size(1)}, options);
  if (output_mask[2]) grad_bias = at::empty_symint({input.sym_size(1)}, options);
  return {grad_input, grad_weight, grad_bias};
}

using Args = std::tuple<int64_t, Groups>;  // num_groups, ranks

Three call_backward(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                    const at::Tensor& mean, const at::Tensor& rstd, std::array<bool, 3> mask, int64_t num_groups,
                    const Groups& ranks) {
  static const auto op = typed_op("torchtp::group_norm_backward", &group_norm_backward_kernel);
  return op.call(grad_output, input, weight, mean, rstd, num_groups, mask, ranks);
}

class GroupNormFunction : public torch::autograd::Function<GroupNormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& input, const Optional& weight,
                               const Optional& bias, int64_t num_groups, double eps, const Groups& ranks) {
    static const auto op = typed_op("torchtp::group_norm", &group_norm_kernel);
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, rstd] = op.call(input, weight, bias, num_groups, eps, ranks);
    ctx->save_for_backward({input, or_undefined(weight), mean, rstd});
    save_args(ctx, Args{num_groups, ranks});
    save_affine(ctx, weight, bias);
    ctx->mark_non_differentiable({mean, rstd});
    return {output, mean, rstd};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [num_groups, ranks] = load_args<Args>(ctx);
    auto [dx, dw, db] = call_backward(grads[0], saved[0], or_nothing(saved[1]), saved[2], saved[3], affine_mask(ctx),
                                      num_groups, ranks);
    return {dx, dw, db, {}, {}, {}};
  }
};

class GroupNormBackwardFunction : public torch::autograd::Function<GroupNormBackwardFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& grad_output, const Variable& input,
                               const Optional& weight, const Variable& mean, const Variable& rstd,
                               std::array<bool, 3> mask, int64_t num_groups, const Groups& ranks) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({grad_output, input, or_undefined(weight), mean, rstd});
    ctx->set_materialize_grads(false);
    save_args(ctx, Args{num_groups, ranks});
    return masked_outputs(ctx, call_backward(grad_output, input, weight, mean, rstd, mask, num_groups, ranks), mask);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list s = ctx->get_saved_variables();
    const auto [num_groups, ranks] = load_args<Args>(ctx);
    std::array<at::Tensor, 3> out;
    {
      at::NoGradGuard no_grad;
      out = group_norm_double_backward(cotangents(ctx, grads), s[0], s[1], or_nothing(s[2]), s[3], s[4], num_groups,
                                       ranks.vec());
    }
    variable_list all(8);
    std::copy(out.begin(), out.end(), all.begin());
    return last_derivative("group_norm", all);
  }
};

Three group_norm_autograd(const at::Tensor& input, const Optional& weight, const Optional& bias, int64_t num_groups,
                          double eps, const Groups& ranks) {
  auto out = GroupNormFunction::apply(input, weight, bias, num_groups, eps, ranks);
  return {out[0], out[1], out[2]};
}

Three group_norm_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                                   const at::Tensor& mean, const at::Tensor& rstd, int64_t num_groups,
                                   std::array<bool, 3> output_mask, const Groups& ranks) {
  const auto all =
      unmask(GroupNormBackwardFunction::apply(grad_output, input, weight, mean, rstd, output_mask, num_groups, ranks),
             output_mask);
  return {all[0], all[1], all[2]};
}

void register_kernels(torch::Library& m) {
  m.impl("group_norm", group_norm_kernel);
  m.impl("group_norm_backward", group_norm_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("group_norm", group_norm_meta);
  m.impl("group_norm_backward", group_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("group_norm", group_norm_autograd);
  m.impl("group_norm_backward", group_norm_backward_autograd);
}

}  // namespace torchtp::spatial
