// torchtp::layer_scale and its backward as dispatcher ops: kernels, shapes for fake tensors, autograd to any order.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "spatial/layer_scale.h"
#include "spatial/op.h"

namespace torchtp::spatial::layer_scale_op {
namespace {

using Optional = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Two = std::tuple<at::Tensor, at::Tensor>;

at::Tensor layer_scale_kernel(const at::Tensor& residual, const at::Tensor& branch, const Optional& gamma,
                              const Optional& keep) {
  return layer_scale(residual, branch, gamma, keep);
}

Two layer_scale_backward_kernel(const at::Tensor& grad_output, const at::Tensor& branch, const Optional& gamma,
                                const Optional& keep, std::array<bool, 2> output_mask) {
  return layer_scale_backward(grad_output, branch, gamma, keep, output_mask);
}

at::Tensor like(const at::Tensor& branch) {
  return at::empty_symint(branch.sym_sizes(), branch.options(), branch.suggest_memory_format());
}

at::Tensor layer_scale_meta(const at::Tensor& residual, const at::Tensor& branch, const Optional& gamma,
                            const Optional& keep) {
  check_layer_scale(residual, branch, gamma, keep);
  return like(branch);
}

Two layer_scale_backward_meta(const at::Tensor& grad_output, const at::Tensor& branch, const Optional& gamma,
                              const Optional& keep, std::array<bool, 2> output_mask) {
  check_layer_scale_backward(grad_output, branch, gamma, keep);
  return {output_mask[0] ? like(branch) : at::Tensor(),
          output_mask[1] && gamma ? at::empty_like(*gamma) : at::Tensor()};
}

// [K] as it broadcasts against x along one dim.
at::Tensor along(const at::Tensor& numbers, const at::Tensor& x, int64_t dim) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[dim] = numbers.numel();
  return numbers.to(x.scalar_type()).view(shape);
}

// The same in ATen's ops, for derivatives of derivatives.
Two differentiable_backward(const at::Tensor& grad_output, const at::Tensor& branch, const Optional& gamma,
                            const Optional& keep, const std::array<bool, 2>& output_mask) {
  const at::Tensor kept = keep ? at::mul(grad_output, along(*keep, branch, 0)) : grad_output;
  at::Tensor grad_branch, grad_gamma;
  if (output_mask[0]) grad_branch = gamma ? at::mul(kept, along(*gamma, branch, 1)) : at::mul(kept, 1);
  if (output_mask[1] && gamma) {
    std::vector<int64_t> others{0};
    for (int64_t dim = 2; dim < branch.dim(); ++dim) others.push_back(dim);
    grad_gamma = at::sum(at::mul(kept, branch), others).to(gamma->scalar_type());
  }
  return {grad_branch, grad_gamma};
}

const auto& backward_op() {
  static const auto op = typed_op("torchtp::layer_scale_backward", &layer_scale_backward_kernel);
  return op;
}

Two layer_scale_backward_autograd(const at::Tensor& grad_output, const at::Tensor& branch, const Optional& gamma,
                                  const Optional& keep, std::array<bool, 2> output_mask) {
  const bool differentiates =
      grad_output.requires_grad() || branch.requires_grad() || (gamma && gamma->requires_grad());
  if (at::GradMode::is_enabled() && differentiates) {
    check_layer_scale_backward(grad_output, branch, gamma, keep);
    return differentiable_backward(grad_output, branch, gamma, keep, output_mask);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().call(grad_output, branch, gamma, keep, output_mask);
}

class LayerScaleFunction : public torch::autograd::Function<LayerScaleFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& residual, const Variable& branch, const Optional& gamma,
                          const Optional& keep) {
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_op("torchtp::layer_scale", &layer_scale_kernel);
    ctx->save_for_backward({branch, or_undefined(gamma), or_undefined(keep)});
    return op.call(residual, branch, gamma, keep);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto gamma = or_nothing(saved[1]), keep = or_nothing(saved[2]);
    const bool wants_gamma = gamma && ctx->needs_input_grad(2);
    auto [grad_branch, grad_gamma] =
        backward_op().call(grads[0], saved[0], gamma, keep, {ctx->needs_input_grad(1), wants_gamma});
    return {grads[0], grad_branch, grad_gamma, {}};
  }
};

at::Tensor layer_scale_autograd(const at::Tensor& residual, const at::Tensor& branch, const Optional& gamma,
                                const Optional& keep) {
  TORCH_CHECK_VALUE(!keep || !keep->requires_grad(), "layer_scale: keep is a mask and gets no gradient; detach it");
  return LayerScaleFunction::apply(residual, branch, gamma, keep);
}

void register_kernels(torch::Library& m) {
  m.impl("layer_scale", layer_scale_kernel);
  m.impl("layer_scale_backward", layer_scale_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("layer_scale", layer_scale_meta);
  m.impl("layer_scale_backward", layer_scale_backward_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("layer_scale", layer_scale_autograd);
  m.impl("layer_scale_backward", layer_scale_backward_autograd);
}

}  // namespace torchtp::spatial::layer_scale_op
