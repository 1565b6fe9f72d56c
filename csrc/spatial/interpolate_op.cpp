// torchtp::interpolate and its backward as dispatcher ops. Linear: the backward of the backward is the forward.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/interpolate.h"
#include "spatial/op.h"

namespace torchtp::spatial {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor interpolate_kernel(const at::Tensor& input, const std::string& mode, at::IntArrayRef output_size,
                              at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                              at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return interpolate(input, {mode, output_size.vec(), scales.vec(), align_corners},
                     make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

at::Tensor interpolate_backward_kernel(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                       const std::string& mode, at::IntArrayRef output_size,
                                       at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                                       at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return interpolate_backward(grad_output, input_sizes, {mode, output_size.vec(), scales.vec(), align_corners},
                              make_cuts(cut_dims, cut_extents, cut_groups, grad_output.dim()));
}

at::Tensor interpolate_meta(const at::Tensor& input, const std::string& mode, at::IntArrayRef output_size,
                            at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                            at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, input.dim());
  const InterpolateParams params{mode, output_size.vec(), scales.vec(), align_corners};
  return at::empty(interpolate_sizes(input.sizes(), params, cuts), input.options(), input.suggest_memory_format());
}

at::Tensor interpolate_backward_meta(const at::Tensor& grad_output, at::IntArrayRef input_sizes, const std::string&,
                                     at::IntArrayRef, at::ArrayRef<double>, bool, at::IntArrayRef, at::IntArrayRef,
                                     const Groups&) {
  return at::empty(input_sizes, grad_output.options(), grad_output.suggest_memory_format());
}

// mode, output_size, scales, align_corners, cut_dims, cut_extents, cut_groups.
using Args = std::tuple<std::string, Ints, std::vector<double>, bool, Ints, Ints, Groups>;

at::Tensor call_forward(const at::Tensor& input, const Args& args) {
  static const auto op = typed_op("torchtp::interpolate", &interpolate_kernel);
  return call_with(op, args, input);
}

at::Tensor call_backward(const at::Tensor& grad_output, const Ints& sizes, const Args& args) {
  static const auto op = typed_op("torchtp::interpolate_backward", &interpolate_backward_kernel);
  return call_with(op, args, grad_output, sizes);
}

class InterpolateFunction : public torch::autograd::Function<InterpolateFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& input, const Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args);
    ctx->saved_data["sizes"] = input.sizes().vec();
    return call_forward(input, args);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {call_backward(grads[0], ctx->saved_data["sizes"].toIntVector(), load_args<Args>(ctx)), {}};
  }
};

class InterpolateBackwardFunction : public torch::autograd::Function<InterpolateBackwardFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& grad_output, const Ints& sizes, const Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args);
    return call_backward(grad_output, sizes, args);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {call_forward(grads[0], load_args<Args>(ctx)), {}, {}};
  }
};

at::Tensor interpolate_autograd(const at::Tensor& input, const std::string& mode, at::IntArrayRef output_size,
                                at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                                at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return InterpolateFunction::apply(
      input, Args{mode, output_size.vec(), scales.vec(), align_corners, cut_dims.vec(), cut_extents.vec(), cut_groups});
}

at::Tensor interpolate_backward_autograd(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                         const std::string& mode, at::IntArrayRef output_size,
                                         at::ArrayRef<double> scales, bool align_corners, at::IntArrayRef cut_dims,
                                         at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return InterpolateBackwardFunction::apply(
      grad_output, input_sizes.vec(),
      Args{mode, output_size.vec(), scales.vec(), align_corners, cut_dims.vec(), cut_extents.vec(), cut_groups});
}

void register_kernels(torch::Library& m) {
  m.impl("interpolate", interpolate_kernel);
  m.impl("interpolate_backward", interpolate_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("interpolate", interpolate_meta);
  m.impl("interpolate_backward", interpolate_backward_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("interpolate", interpolate_autograd);
  m.impl("interpolate_backward", interpolate_backward_autograd);
}

}  // namespace torchtp::spatial
