#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "spatial/saved_args.h"

// What the files <op>_op.cpp share: how an op calls another one through the dispatcher, and what its autograd nodes do
// alike.
namespace torchtp::spatial {

// The dispatcher op "torchtp::..." with the signature of `kernel`; keep it in a static.
template <typename Kernel>
auto typed_op(const char* name, Kernel*) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Kernel>();
}

inline bool needs_graph_of(const at::Tensor& tensor) {
  return tensor.defined() &&
         ((at::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined());
}
inline bool needs_graph_of(const std::optional<at::Tensor>& tensor) { return tensor && needs_graph_of(*tensor); }

// Whether the call is inside of a transform of torch.func.
inline bool is_transformed() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// Whether a call with these tensors has to go through its autograd Function, which else would only cost. The Function
// is also what tells the users of forward derivatives and torch.func that there is no rule.
template <typename... Tensors>
bool needs_graph(const Tensors&... tensors) {
  return (needs_graph_of(tensors) || ...) || is_transformed();
}

// The op's own kernel.
template <typename Op, typename... Args>
auto call_below(const Op& op, const Args&... args) {
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(args...);
}

// op.call(first..., the elements of args...).
template <typename Op, typename Tuple, typename... First>
auto call_with(const Op& op, const Tuple& args, const First&... first) {
  return std::apply([&](const auto&... rest) { return op.call(first..., rest...); }, args);
}

inline at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) { return tensor ? *tensor : at::Tensor(); }
inline std::optional<at::Tensor> or_nothing(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// Whether there are a weight and a bias.
using Affine = std::tuple<bool, bool>;
inline Affine affine_of(const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias) {
  return {or_undefined(weight).defined(), or_undefined(bias).defined()};
}

// Which of (input, weight, bias) want a gradient, for a Function whose first arguments they are. Autograd counts only
// the tensors that are there.
inline std::array<bool, 3> affine_mask(torch::autograd::AutogradContext* ctx, const Affine& affine) {
  const auto [has_weight, has_bias] = affine;
  return {ctx->needs_input_grad(0), has_weight && ctx->needs_input_grad(1),
          has_bias && ctx->needs_input_grad(has_weight ? 2 : 1)};
}

// An autograd Function can't return undefined tensors: of (dx, dw, db) what the mask leaves out is not among the
// outputs.
inline torch::autograd::variable_list masked(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& gradients,
                                             const std::array<bool, 3>& mask) {
  torch::autograd::variable_list outputs;
  if (mask[0]) outputs.push_back(std::get<0>(gradients));
  if (mask[1]) outputs.push_back(std::get<1>(gradients));
  if (mask[2]) outputs.push_back(std::get<2>(gradients));
  return outputs;
}

// The three of them again, of such outputs or of their cotangents; undefined where there is none.
inline std::array<at::Tensor, 3> unmask(const torch::autograd::variable_list& list, const std::array<bool, 3>& mask) {
  std::array<at::Tensor, 3> all;
  size_t next = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (mask[i]) all[i] = list[next++];
  }
  return all;
}

// What a hand-written double backward returns: differentiated once more it raises, where it would silently be constant.
inline torch::autograd::variable_list last_derivative(const char* op, torch::autograd::variable_list grads) {
  if (!at::GradMode::is_enabled()) return grads;
  std::vector<size_t> places;
  torch::autograd::variable_list defined;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    places.push_back(i);
    defined.push_back(grads[i].detach());
  }
  const auto error = std::make_shared<torch::autograd::DelayedError>(
      std::string(op) + " of a cut tensor can be differentiated twice only", static_cast<int>(defined.size()));
  defined = (*error)(std::move(defined));
  for (size_t i = 0; i < places.size(); ++i) grads[places[i]] = defined[i];
  return grads;
}

}  // namespace torchtp::spatial
