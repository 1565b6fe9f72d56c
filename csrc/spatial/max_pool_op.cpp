// torchtp::max_pool, its backward and that one's backward as dispatcher ops.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "spatial/max_pool.h"
#include "spatial/op.h"

namespace torchtp::spatial::max_pool_op {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

std::tuple<at::Tensor, at::Tensor> max_pool_kernel(const at::Tensor& input, at::IntArrayRef kernel_size,
                                                   at::IntArrayRef stride, at::IntArrayRef padding,
                                                   at::IntArrayRef dilation, bool ceil_mode, at::IntArrayRef cut_dims,
                                                   at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return max_pool(input, {kernel_size.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode},
                  make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

at::Tensor max_pool_backward_kernel(const at::Tensor& grad_output, const at::Tensor& indices,
                                    at::IntArrayRef input_sizes, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                                    at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode,
                                    at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return max_pool_backward(grad_output, indices, input_sizes,
                           {kernel_size.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode},
                           make_cuts(cut_dims, cut_extents, cut_groups, grad_output.dim()));
}

at::Tensor max_pool_gather_kernel(const at::Tensor& input, const at::Tensor& indices, at::IntArrayRef kernel_size,
                                  at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                  bool ceil_mode, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                                  const Groups& cut_groups) {
  return max_pool_gather(input, indices, {kernel_size.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode},
                         make_cuts(cut_dims, cut_extents, cut_groups, input.dim()));
}

std::tuple<at::Tensor, at::Tensor> max_pool_meta(const at::Tensor& input, at::IntArrayRef kernel_size,
                                                 at::IntArrayRef stride, at::IntArrayRef padding,
                                                 at::IntArrayRef dilation, bool ceil_mode, at::IntArrayRef cut_dims,
                                                 at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const PoolParams params{kernel_size.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode};
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, input.dim());
  if (planned(cuts)) return max_pool(input, params, cuts);
  const PoolGeometry geometry("max_pool", input.sizes(), params, cuts);
  const auto format = input.suggest_memory_format();
  return {at::empty(geometry.output_sizes(), input.options(), format),
          at::empty(geometry.output_sizes(), input.options().dtype(at::kLong), format)};
}

at::Tensor max_pool_backward_meta(const at::Tensor& grad_output, const at::Tensor& indices, at::IntArrayRef input_sizes,
                                  at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                                  at::IntArrayRef dilation, bool ceil_mode, at::IntArrayRef cut_dims,
                                  at::IntArrayRef cut_extents, const Groups& cut_groups) {
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, grad_output.dim());
  const PoolParams params{kernel_size.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode};
  if (planned(cuts)) return max_pool_backward(grad_output, indices, input_sizes, params, cuts);
  const PoolGeometry geometry("max_pool_backward", input_sizes, params, cuts);
  geometry.check_backward("max_pool_backward", input_sizes, grad_output);
  check_indices("max_pool_backward", indices, geometry, grad_output);
  return at::empty(input_sizes, grad_output.options(), indices.suggest_memory_format());
}

at::Tensor max_pool_gather_meta(const at::Tensor& input, const at::Tensor& indices, at::IntArrayRef kernel_size,
                                at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                bool ceil_mode, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                                const Groups& cut_groups) {
  const auto cuts = make_cuts(cut_dims, cut_extents, cut_groups, input.dim());
  const PoolParams params{kernel_size.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode};
  if (planned(cuts)) return max_pool_gather(input, indices, params, cuts);
  check_indices("max_pool_gather", indices, PoolGeometry("max_pool_gather", input.sizes(), params, cuts), input);
  return at::empty_symint(indices.sym_sizes(), input.options(), indices.suggest_memory_format());
}

// kernel_size, stride, padding, dilation, ceil_mode, cut_dims, cut_extents, cut_groups.
using Args = std::tuple<Ints, Ints, Ints, Ints, bool, Ints, Ints, Groups>;

const auto& forward_op() {
  static const auto op = typed_op("torchtp::max_pool", &max_pool_kernel);
  return op;
}

const auto& backward_op() {
  static const auto op = typed_op("torchtp::max_pool_backward", &max_pool_backward_kernel);
  return op;
}

const auto& gather_op() {
  static const auto op = typed_op("torchtp::max_pool_gather", &max_pool_gather_kernel);
  return op;
}

class MaxPoolFunction : public torch::autograd::Function<MaxPoolFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Variable& input, const Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [output, indices] = call_with(forward_op(), args, input);
    save_args(ctx, args, input.sizes().vec());
    ctx->save_for_backward({indices});
    ctx->mark_non_differentiable({indices});
    return {output, indices};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [args, sizes] = load_args<Args, Ints>(ctx);
    return {call_with(backward_op(), args, grads[0], ctx->get_saved_variables()[0], sizes), {}};
  }
};

class MaxPoolBackwardFunction : public torch::autograd::Function<MaxPoolBackwardFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& grad_output, const Variable& indices, const Ints& sizes,
                          const Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args);
    ctx->save_for_backward({indices});
    return call_with(backward_op(), args, grad_output, indices, sizes);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [args] = load_args<Args>(ctx);
    return {call_with(gather_op(), args, grads[0], ctx->get_saved_variables()[0]), {}, {}, {}};
  }
};

class MaxPoolGatherFunction : public torch::autograd::Function<MaxPoolGatherFunction> {
 public:
  static Variable forward(AutogradContext* ctx, const Variable& input, const Variable& indices, const Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args, input.sizes().vec());
    ctx->save_for_backward({indices});
    return call_with(gather_op(), args, input, indices);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [args, sizes] = load_args<Args, Ints>(ctx);
    return {call_with(backward_op(), args, grads[0], ctx->get_saved_variables()[0], sizes), {}, {}};
  }
};

Args make_args(at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
               bool ceil_mode, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  return {kernel_size.vec(), stride.vec(),   padding.vec(),     dilation.vec(),
          ceil_mode,         cut_dims.vec(), cut_extents.vec(), cut_groups};
}

std::tuple<at::Tensor, at::Tensor> max_pool_autograd(const at::Tensor& input, at::IntArrayRef kernel_size,
                                                     at::IntArrayRef stride, at::IntArrayRef padding,
                                                     at::IntArrayRef dilation, bool ceil_mode, at::IntArrayRef cut_dims,
                                                     at::IntArrayRef cut_extents, const Groups& cut_groups) {
  if (!needs_graph(input))
    return call_below(forward_op(), input, kernel_size, stride, padding, dilation, ceil_mode, cut_dims, cut_extents,
                      cut_groups);
  auto out = MaxPoolFunction::apply(
      input, make_args(kernel_size, stride, padding, dilation, ceil_mode, cut_dims, cut_extents, cut_groups));
  return {out[0], out[1]};
}

at::Tensor max_pool_backward_autograd(const at::Tensor& grad_output, const at::Tensor& indices,
                                      at::IntArrayRef input_sizes, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode,
                                      at::IntArrayRef cut_dims, at::IntArrayRef cut_extents, const Groups& cut_groups) {
  if (!needs_graph(grad_output))
    return call_below(backward_op(), grad_output, indices, input_sizes, kernel_size, stride, padding, dilation,
                      ceil_mode, cut_dims, cut_extents, cut_groups);
  return MaxPoolBackwardFunction::apply(
      grad_output, indices, input_sizes.vec(),
      make_args(kernel_size, stride, padding, dilation, ceil_mode, cut_dims, cut_extents, cut_groups));
}

at::Tensor max_pool_gather_autograd(const at::Tensor& input, const at::Tensor& indices, at::IntArrayRef kernel_size,
                                    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                                    bool ceil_mode, at::IntArrayRef cut_dims, at::IntArrayRef cut_extents,
                                    const Groups& cut_groups) {
  if (!needs_graph(input))
    return call_below(gather_op(), input, indices, kernel_size, stride, padding, dilation, ceil_mode, cut_dims,
                      cut_extents, cut_groups);
  return MaxPoolGatherFunction::apply(
      input, indices, make_args(kernel_size, stride, padding, dilation, ceil_mode, cut_dims, cut_extents, cut_groups));
}

void register_kernels(torch::Library& m) {
  m.impl("max_pool", max_pool_kernel);
  m.impl("max_pool_backward", max_pool_backward_kernel);
  m.impl("max_pool_gather", max_pool_gather_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchtp, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, CUDA, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(torchtp, Meta, m) {
  m.impl("max_pool", max_pool_meta);
  m.impl("max_pool_backward", max_pool_backward_meta);
  m.impl("max_pool_gather", max_pool_gather_meta);
}
TORCH_LIBRARY_IMPL(torchtp, Autograd, m) {
  m.impl("max_pool", max_pool_autograd);
  m.impl("max_pool_backward", max_pool_backward_autograd);
  m.impl("max_pool_gather", max_pool_gather_autograd);
}

}  // namespace torchtp::spatial::max_pool_op
