// torchtp::group_norm and its backward as dispatcher ops: kernels, shapes for fake tensors, autograd to second order.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/group_norm.h"
#include "spatial/norm_op.h"

namespace torchtp::spatial::group_norm_op {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Three group_norm_kernel(const at::Tensor& input, const Optional& weight, const Optional& bias, int64_t num_groups,
                        double eps, const Groups& cut_groups) {
  return group_norm(input, weight, bias, num_groups, eps, cut_groups.vec());
}

Three group_norm_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                                 const at::Tensor& mean, const at::Tensor& rstd, int64_t num_groups,
                                 std::array<bool, 3> output_mask, const Groups& cut_groups) {
  return group_norm_backward(grad_output, input, weight, mean, rstd, num_groups, output_mask, cut_groups.vec());
}

Three group_norm_meta(const at::Tensor& input, const Optional& weight, const Optional& bias, int64_t num_groups, double,
                      const Groups&) {
  check_group_norm(input, weight, bias, num_groups);
  const std::vector<c10::SymInt> sizes{input.sym_size(0), num_groups};
  const auto options = input.options().dtype(statistics_type(input.scalar_type()));
  return {at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format()),
          at::empty_symint(sizes, options), at::empty_symint(sizes, options)};
}

Three group_norm_backward_meta(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                               const at::Tensor& mean, const at::Tensor& rstd, int64_t num_groups,
                               std::array<bool, 3> output_mask, const Groups&) {
  check_group_norm_backward(grad_output, input, weight, mean, rstd, num_groups);
  return norm_backward_meta(input, weight, output_mask);
}

const auto& forward_op() {
  static const auto op = typed_op("torchtp::group_norm", &group_norm_kernel);
  return op;
}

struct GroupNorm {
  using Args = std::tuple<int64_t, Groups>;  // num_groups, cut_groups
  static constexpr const char* name = "group_norm";
  // Constants: mean, rstd.
  static Three backward(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                        const variable_list& constants, const std::array<bool, 3>& mask, const Args& args) {
    static const auto op = typed_op("torchtp::group_norm_backward", &group_norm_backward_kernel);
    const auto& [num_groups, cut_groups] = args;
    return op.call(grad_output, input, weight, constants[0], constants[1], num_groups, mask, cut_groups);
  }
  static std::array<at::Tensor, 3> double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                   const at::Tensor& grad_output, const at::Tensor& input,
                                                   const Optional& weight, const variable_list& constants,
                                                   const Args& args) {
    const auto& [num_groups, cut_groups] = args;
    return group_norm_double_backward(cotangents, grad_output, input, weight, constants[0], constants[1], num_groups,
                                      cut_groups.vec());
  }
};

class GroupNormFunction : public torch::autograd::Function<GroupNormFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& input, const Optional& weight,
                               const Optional& bias, int64_t num_groups, double eps, const Groups& cut_groups) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, mean, rstd] = forward_op().call(input, weight, bias, num_groups, eps, cut_groups);
    ctx->save_for_backward({input, or_undefined(weight), mean, rstd});
    save_args(ctx, GroupNorm::Args{num_groups, cut_groups}, affine_of(weight, bias));
    ctx->mark_non_differentiable({mean, rstd});
    return {output, mean, rstd};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto [args, affine] = load_args<GroupNorm::Args, Affine>(ctx);
    auto [dx, dw, db] = GroupNorm::backward(grads[0], saved[0], or_nothing(saved[1]), {saved[2], saved[3]},
                                            affine_mask(ctx, affine), args);
    return {dx, dw, db, {}, {}, {}};
  }
};

Three group_norm_autograd(const at::Tensor& input, const Optional& weight, const Optional& bias, int64_t num_groups,
                          double eps, const Groups& cut_groups) {
  if (!needs_graph(input, weight, bias)) {
    return call_below(forward_op(), input, weight, bias, num_groups, eps, cut_groups);
  }
  auto out = GroupNormFunction::apply(input, weight, bias, num_groups, eps, cut_groups);
  return {out[0], out[1], out[2]};
}

Three group_norm_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                                   const at::Tensor& mean, const at::Tensor& rstd, int64_t num_groups,
                                   std::array<bool, 3> output_mask, const Groups& cut_groups) {
  return norm_backward_autograd<GroupNorm>(grad_output, input, weight, {mean, rstd}, output_mask,
                                           {num_groups, cut_groups});
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

}  // namespace torchtp::spatial::group_norm_op
