#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "spatial/norm.h"
#include "spatial/op.h"

// What the dispatcher ops of the norms share: shapes and autograd of their backward.
namespace torchtp::spatial {

using Optional = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

inline Three norm_backward_meta(const at::Tensor& input, const Optional& weight, const std::array<bool, 3>& mask) {
  const auto options = input.options().dtype(weight ? weight->scalar_type() : statistics_type(input.scalar_type()));
  at::Tensor grad_input, grad_weight, grad_bias;
  if (mask[0]) grad_input = at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format());
  if (mask[1]) grad_weight = at::empty_symint({input.sym_size(1)}, options);
  if (mask[2]) grad_bias = at::empty_symint({input.sym_size(1)}, options);
  return {grad_input, grad_weight, grad_bias};
}

// Of (dx, dw, db) = backward(dy, x, w, constants, mask, args). `Op` has: Args, a tuple; name; backward(dy, x, w,
// constants, mask, args); double_backward(cotangents, dy, x, w, constants, args). The constants are tensors that get no
// gradient: the statistics.
template <typename Op>
class NormBackwardFunction : public torch::autograd::Function<NormBackwardFunction<Op>> {
 public:
  using variable_list = torch::autograd::variable_list;

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& grad_output,
                               const at::Tensor& input, const Optional& weight, const variable_list& constants,
                               const std::array<bool, 3>& mask, const typename Op::Args& args) {
    at::AutoDispatchBelowADInplaceOrView below;
    variable_list saved{grad_output, input, or_undefined(weight)};
    saved.insert(saved.end(), constants.begin(), constants.end());
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    save_args(ctx, args, mask);
    return masked(Op::backward(grad_output, input, weight, constants, mask, args), mask);
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const variable_list constants(saved.begin() + 3, saved.end());
    const auto [args, mask] = load_args<typename Op::Args, std::array<bool, 3>>(ctx);
    variable_list all(6);
    {
      at::NoGradGuard no_grad;
      const auto out =
          Op::double_backward(unmask(grads, mask), saved[0], saved[1], or_nothing(saved[2]), constants, args);
      std::copy(out.begin(), out.end(), all.begin());
    }
    return last_derivative(Op::name, std::move(all));
  }
};

// The kernel for the key Autograd.
template <typename Op>
Three norm_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input, const Optional& weight,
                             const torch::autograd::variable_list& constants, const std::array<bool, 3>& mask,
                             const typename Op::Args& args) {
  if (!needs_graph(grad_output, input, weight)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return Op::backward(grad_output, input, weight, constants, mask, args);
  }
  const auto [dx, dw, db] =
      unmask(NormBackwardFunction<Op>::apply(grad_output, input, weight, constants, mask, args), mask);
  return {dx, dw, db};
}

}  // namespace torchtp::spatial
