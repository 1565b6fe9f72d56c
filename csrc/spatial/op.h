#pragma once

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

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

}  // namespace torchtp::spatial
