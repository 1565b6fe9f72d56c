#pragma once

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// What the files <op>_op.cpp share: how an op calls another one through the dispatcher, and how an autograd node keeps
// the op's arguments that are not tensors.
namespace torchtp::spatial {

using Ints = std::vector<int64_t>;
using Groups = c10::List<std::string>;

// The dispatcher op "torchtp::..." with the signature of `kernel`; keep it in a static.
template <typename Kernel>
auto typed_op(const char* name, Kernel*) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Kernel>();
}

// Arguments of a call beside its tensors, as a tuple of values that own their memory.
template <typename... Args>
void save_args(torch::autograd::AutogradContext* ctx, const std::tuple<Args...>& args) {
  ctx->saved_data["args"] = c10::IValue(args);
}

template <typename Tuple>
Tuple load_args(torch::autograd::AutogradContext* ctx) {
  return ctx->saved_data["args"].to<Tuple>();
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

// Which of (input, weight, bias) want a gradient, for a Function whose first arguments they are. Autograd counts only
// the tensors that are there.
inline void save_affine(torch::autograd::AutogradContext* ctx, const std::optional<at::Tensor>& weight,
                        const std::optional<at::Tensor>& bias) {
  ctx->saved_data["has_weight"] = or_undefined(weight).defined();
  ctx->saved_data["has_bias"] = or_undefined(bias).defined();
}
inline std::array<bool, 3> affine_mask(torch::autograd::AutogradContext* ctx) {
  const bool has_weight = ctx->saved_data["has_weight"].toBool(), has_bias = ctx->saved_data["has_bias"].toBool();
  return {ctx->needs_input_grad(0), has_weight && ctx->needs_input_grad(1),
          has_bias && ctx->needs_input_grad(has_weight ? 2 : 1)};
}

// An autograd Function can't return undefined tensors: of (dx, dw, db) what the mask leaves out is not among the
// outputs.
inline torch::autograd::variable_list masked_outputs(torch::autograd::AutogradContext* ctx,
                                                     const std::tuple<at::Tensor, at::Tensor, at::Tensor>& gradients,
                                                     const std::array<bool, 3>& mask) {
  const std::array<at::Tensor, 3> all{std::get<0>(gradients), std::get<1>(gradients), std::get<2>(gradients)};
  torch::autograd::variable_list outputs;
  Ints places(3, -1);
  for (size_t i = 0; i < all.size(); ++i) {
    if (!mask[i]) continue;
    places[i] = static_cast<int64_t>(outputs.size());
    outputs.push_back(all[i]);
  }
  ctx->saved_data["places"] = places;
  return outputs;
}

// The three of them again, undefined where there is none: of outputs by the mask, of cotangents by what was saved.
inline std::array<at::Tensor, 3> unmask(const torch::autograd::variable_list& list, const std::array<bool, 3>& mask) {
  std::array<at::Tensor, 3> all;
  size_t next = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (mask[i]) all[i] = list[next++];
  }
  return all;
}
inline std::array<at::Tensor, 3> cotangents(torch::autograd::AutogradContext* ctx,
                                            const torch::autograd::variable_list& grads) {
  const Ints places = ctx->saved_data["places"].toIntVector();
  return unmask(grads, {places[0] >= 0, places[1] >= 0, places[2] >= 0});
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
