// torchtp::avg_pool and its backward as dispatcher ops. Linear: the backward of the backward is the forward.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/avg_pool.h"
#include "spatial/op.h"

namespace torchtp::spatial {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

PoolParams make_params(at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding, bool ceil_mode) {
  return {kernel_size.vec(), stride.vec(), padding.vec(), {1}, ceil_mode};
}

at::Tensor avg_pool_kernel(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                           at::IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                           std::optional<int64_t> divisor_override, at::IntArrayRef cut_dims,
                           at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return avg_pool(input, make_params(kernel_size, stride, padding, ceil_mode), {count_include_pad, divisor_override},
                  make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

at::Tensor avg_pool_backward_kernel(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                    at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                                    bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor_override,
                                    at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return avg_pool_backward(grad_output, input_sizes, make_params(kernel_size, stride, padding, ceil_mode),
                           {count_include_pad, divisor_override},
                           make_cuts(cut_dims, cut_extents, cut_groups, grad_output.dim()));
}

at::Tensor avg_pool_meta(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                         at::IntArrayRef padding, bool ceil_mode, bool, std::optional<int64_t>,
                         at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const PoolGeometry geometry("avg_pool", input.sizes(), make_params(kernel_size, stride, padding, ceil_mode),
                              make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
  return at::empty(geometry.output_sizes(), input.options(), input.suggest_memory_format());
}

at::Tensor avg_pool_backward_meta(const at::Tensor& grad_output, at::IntArrayRef input_sizes, at::IntArrayRef,
                                  at::IntArrayRef, at::IntArrayRef, bool, bool, std::optional<int64_t>, at::IntArrayRef,
                                  at::IntArrayRef, const Groups&) {
  return at::empty(input_sizes, grad_output.options(), grad_output.suggest_memory_format());
}

// kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, cut_dims, cut_extents, cut_groups.
using Args = std::tuple<Ints, Ints, Ints, bool, bool, std::optional<int64_t>, Ints, Ints, Groups>;

at::Tensor call_forward(const at::Tensor& input, const Args& args) {
  static const auto op = typed_op("torchtp::avg_pool", &avg_pool_kernel);
  return call_with(op, args, input);
}

at::Tensor call_backward(const at::Tensor& grad_output, const Ints& sizes, const Args& args) {
  static const auto op = typed_op("torchtp::avg_pool_backward", &avg_pool_backward_kernel);
  return call_with(op, args, grad_output, sizes);
}

class AvgPoolFunction : public torch::autograd::Function<AvgPoolFunction> {
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

class AvgPoolBackwardFunction : public torch::autograd::Function<AvgPoolBackwardFunction> {
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

Args make_args(at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding, bool ceil_mode,
               bool count_include_pad, std::optional<int64_t> divisor_override, at::IntArrayRef cut_dims,
               at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return {kernel_size.vec(), stride.vec(),   padding.vec(),     ceil_mode, count_include_pad,
          divisor_override,  cut_dims.vec(), cut_extents.vec(), cut_groups};
}

at::Tensor avg_pool_autograd(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                             at::IntArrayRef padding, bool ceil_mode, bool count_include_pad,
                             std::optional<int64_t> divisor_override, at::IntArrayRef cut_dims,
                             at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return AvgPoolFunction::apply(input, make_args(kernel_size, stride, padding, ceil_mode, count_include_pad,
                                                 divisor_override, cut_dims, cut_extents, cut_groups));
}

at::Tensor avg_pool_backward_autograd(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                      at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                                      bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor_override,
                                      at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return AvgPoolBackwardFunction::apply(grad_output, input_sizes.vec(),
                                        make_args(kernel_size, stride, padding, ceil_mode, count_include_pad,
                                                  divisor_override, cut_dims, cut_extents, cut_groups));
}

void register_kernels(torch::Library& m) {
  m.impl("avg_pool", avg_pool_kernel);
  m.impl("avg_pool_backward", avg_pool_backward_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("avg_pool", avg_pool_meta);
  m.impl("avg_pool_backward", avg_pool_backward_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("avg_pool", avg_pool_autograd);
  m.impl("avg_pool_backward", avg_pool_backward_autograd);
}

}  // namespace torchtp::spatial
