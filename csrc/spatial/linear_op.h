#pragma once

#include "spatial/op.h"

// Autograd of an op that is linear in its only differentiable tensor, as pooling by average and resampling are: the
// backward of the backward is the forward.
//
// `Op` names the pair: Args, a tuple of the arguments that are not tensors, and the dispatcher ops
// forward() of (input, rest...) and backward() of (grad_output, local input sizes, args...).
namespace torchtp::spatial {

template <typename Op>
class LinearFunction : public torch::autograd::Function<LinearFunction<Op>> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            const typename Op::Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args, input.sizes().vec());
    return call_with(Op::forward(), args, input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto [args, sizes] = load_args<typename Op::Args, Ints>(ctx);
    return {call_with(Op::backward(), args, grads[0], sizes), {}};
  }
};

template <typename Op>
class LinearBackwardFunction : public torch::autograd::Function<LinearBackwardFunction<Op>> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& grad_output, const Ints& sizes,
                            const typename Op::Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_args(ctx, args);
    return call_with(Op::backward(), args, grad_output, sizes);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto [args] = load_args<typename Op::Args>(ctx);
    return {call_with(Op::forward(), args, grads[0]), {}, {}};
  }
};

// A list as an autograd node keeps it, other values as they are.
inline Ints keep(at::IntArrayRef list) { return list.vec(); }
inline std::vector<double> keep(at::ArrayRef<double> list) { return list.vec(); }
template <typename T>
const T& keep(const T& value) {
  return value;
}

// The kernels for the key Autograd: the arguments are those of the schema.
template <typename Op, typename... Rest>
at::Tensor linear_autograd(const at::Tensor& input, const Rest&... rest) {
  if (!needs_graph(input)) return call_below(Op::forward(), input, rest...);
  return LinearFunction<Op>::apply(input, typename Op::Args{keep(rest)...});
}

template <typename Op, typename... Rest>
at::Tensor linear_backward_autograd(const at::Tensor& grad_output, at::IntArrayRef input_sizes, const Rest&... rest) {
  if (!needs_graph(grad_output)) return call_below(Op::backward(), grad_output, input_sizes, rest...);
  return LinearBackwardFunction<Op>::apply(grad_output, input_sizes.vec(), typename Op::Args{keep(rest)...});
}

}  // namespace torchtp::spatial
