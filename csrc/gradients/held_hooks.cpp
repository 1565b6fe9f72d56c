#include "gradients/held_hooks.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "gradients/hooks.h"

namespace torchtp::gradients {
namespace {

using torch::autograd::FunctionPreHook;

class StandIn : public FunctionPreHook {
 public:
  explicit StandIn(OwnHook own_hook) : own_hook_(std::move(own_hook)) {}
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& gradients) override {
    return {made_plain(own_hook_, gradients.at(0))};
  }

 private:
  const OwnHook own_hook_;
};

}  // namespace

at::Tensor made_plain(const OwnHook& hook, const at::Tensor& gradient) {
  const bool is_plain = !gradient.defined() || !gradient.key_set().has(c10::DispatchKey::Python);
  return is_plain || !hook.call ? gradient : hook.call(gradient);
}

std::unique_ptr<HeldHooks> HeldHooks::of(const at::Tensor& parameter, bool of_gradient, const OwnHook& own_hook) {
  auto& hooks = torch::autograd::impl::hooks(parameter);
  const auto is_of_others = [](const auto& hook) { return !is_of_listener(*hook); };
  const bool has_of_gradient = of_gradient && std::any_of(hooks.begin(), hooks.end(), is_of_others) &&
                               !(own_hook.is_alone_on && own_hook.is_alone_on(parameter));
  if (!has_of_gradient && !torch::autograd::impl::post_acc_grad_hooks(parameter)) return nullptr;
  auto held = std::make_unique<HeldHooks>(parameter);
  if (has_of_gradient) {
    const at::Tensor& own = parameter.grad();
    if (own.defined()) held->before_ = own.detach().clone();
    for (auto& hook : hooks) {
      if (is_of_others(hook)) held->take(hook, std::make_unique<StandIn>(own_hook));
    }
  }
  held->after_accumulation_ = std::exchange(torch::autograd::impl::post_acc_grad_hooks(parameter), nullptr);
  return held;
}

void HeldHooks::take(std::unique_ptr<Hook>& hook, std::unique_ptr<Hook> stand_in) {
  const Hook* const place = stand_in.get();  // before it is moved: arguments are evaluated in any order
  of_gradient_.emplace_back(place, std::exchange(hook, std::move(stand_in)));
}

void HeldHooks::put_back() {
  auto& hooks = torch::autograd::impl::hooks(parameter_);
  for (auto& held : std::exchange(of_gradient_, {})) {
    const Hook* const stand_in = held.first;
    const auto place =
        std::find_if(hooks.begin(), hooks.end(), [stand_in](const auto& hook) { return hook.get() == stand_in; });
    if (place != hooks.end()) {
      *place = std::move(held.second);
    } else {
      hooks.push_back(std::move(held.second));  // Python has made a new table of hooks
    }
  }
  if (after_accumulation_) torch::autograd::impl::post_acc_grad_hooks(parameter_) = std::move(after_accumulation_);
}

void HeldHooks::run() {
  at::NoGradGuard no_grad;  // as in a backward without create_graph
  const bool has_of_gradient = !of_gradient_.empty();
  put_back();
  if (has_of_gradient) run_of_gradient();
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter_)) (*hook)(parameter_);
}

void HeldHooks::run_of_gradient() {
  at::Tensor& own = parameter_.mutable_grad();
  if (!own.defined()) {  // as autograd has it: a gradient that came as none is shown as none
    std::vector<at::Tensor> none(1);
    for (const auto& hook : torch::autograd::impl::hooks(parameter_)) none = (*hook)(none);
    if (none.at(0).defined()) own = none.at(0).detach();
    return;
  }
  // Of its own memory: a hook may keep it, and the bucket's is written again.
  const at::Tensor added = before_.defined() ? own - before_ : own.clone();
  const auto version = added._version();
  at::Tensor result = added;
  for (const auto& hook : torch::autograd::impl::hooks(parameter_)) result = (*hook)({result}).at(0);
  if (result.is_same(added) && added._version() == version) return;
  TORCH_CHECK(result.defined() && result.sizes() == own.sizes(), "gradients: a hook of a parameter of shape ",
              parameter_.sizes(), " must give a gradient of that shape, but it gave ",
              result.defined() ? c10::str(result.sizes()) : std::string("none"));
  own.copy_(before_.defined() ? before_ + result : result);
}

}  // namespace torchtp::gradients
