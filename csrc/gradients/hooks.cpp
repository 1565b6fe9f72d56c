#include "gradients/hooks.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace torchtp::gradients {
namespace {

using torch::autograd::variable_list;

// Whether the backward that runs adds to the gradient; torch.autograd.grad() does not.
bool is_needed(const torch::autograd::Node* accumulator) {
  const auto* planned = torch::autograd::get_current_graph_task_exec_info();
  if (!planned || planned->empty()) return true;  // a plain backward(): everything it reaches
  const auto found = planned->find(const_cast<torch::autograd::Node*>(accumulator));
  return found != planned->end() && found->second.needed_;
}

class BeforeAccumulation : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAccumulation(std::weak_ptr<Listener> listener) : listener_(std::move(listener)) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto listener = listener_.lock()) listener->before_accumulation();
    return gradients;
  }

 private:
  std::weak_ptr<Listener> listener_;
};

class BeforeHooks : public torch::autograd::FunctionPreHook {
 public:
  BeforeHooks(std::weak_ptr<Listener> listener, const torch::autograd::Node* accumulator)
      : listener_(std::move(listener)), accumulator_(accumulator) {}
  variable_list operator()(const variable_list& gradients) override {
    const auto node = torch::autograd::get_current_node();  // none where held hooks are run, after accumulation
    if (node.get() != accumulator_ || !is_needed(accumulator_)) return gradients;
    if (const auto listener = listener_.lock()) listener->before_accumulation();
    return gradients;
  }
  bool is_over() const { return listener_.expired(); }
  bool tells(const std::weak_ptr<Listener>& listener, const torch::autograd::Node* accumulator) const {
    return listener_.lock() == listener.lock() && accumulator_ == accumulator;
  }

 private:
  const std::weak_ptr<Listener> listener_;
  const torch::autograd::Node* const accumulator_;
};

class AfterAccumulation : public torch::autograd::FunctionPostHook {
 public:
  AfterAccumulation(std::weak_ptr<Listener> listener, size_t index) : listener_(std::move(listener)), index_(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    if (const auto listener = listener_.lock()) listener->after_accumulation(index_);
    return outputs;
  }
  std::shared_ptr<Listener> listener() const { return listener_.lock(); }

 private:
  std::weak_ptr<Listener> listener_;
  size_t index_;
};

// The engine drops its callbacks unrun when the backward throws.
class EndOfBackward {
 public:
  explicit EndOfBackward(std::weak_ptr<Listener> listener) : listener_(std::move(listener)) {}
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;
  ~EndOfBackward() {
    if (ran_) return;
    if (const auto listener = listener_.lock()) listener->abandoned_backward();
  }
  void run() {
    ran_ = true;
    // A node is being evaluated on this thread: that of the outer backward.
    const bool nested = static_cast<bool>(torch::autograd::get_current_node());
    if (const auto listener = listener_.lock()) listener->end_of_backward(nested);
  }

 private:
  std::weak_ptr<Listener> listener_;
  bool ran_ = false;
};

// A frozen parameter takes no hook as it is, but keeps one until it is trained.
class AsTrained {
 public:
  explicit AsTrained(const at::Tensor& parameter) : parameter_(parameter), trained_(parameter.requires_grad()) {
    parameter_.set_requires_grad(true);
  }
  AsTrained(const AsTrained&) = delete;
  AsTrained& operator=(const AsTrained&) = delete;
  ~AsTrained() { parameter_.set_requires_grad(trained_); }

 private:
  const at::Tensor& parameter_;
  const bool trained_;
};

}  // namespace

bool may_train(const at::Tensor& parameter) {
  const bool has_derivatives =
      at::isFloatingType(parameter.scalar_type()) || at::isComplexType(parameter.scalar_type());
  return parameter.requires_grad() || (has_derivatives && !parameter.is_inference());
}

Accumulator listen(const at::Tensor& parameter, size_t index, const std::weak_ptr<Listener>& listener,
                   const Accumulator& before) {
  if (before && torch::autograd::impl::try_get_grad_accumulator(parameter) == before) return before;
  const AsTrained as_trained(parameter);
  Accumulator accumulator = torch::autograd::impl::grad_accumulator(parameter);
  accumulator->add_pre_hook(std::make_unique<BeforeAccumulation>(listener));
  accumulator->add_post_hook(std::make_unique<AfterAccumulation>(listener, index));
  return accumulator;
}

void listen_first(const at::Tensor& parameter, const Accumulator& accumulator,
                  const std::weak_ptr<Listener>& listener) {
  auto& hooks = torch::autograd::impl::hooks(parameter);
  bool is_there = hooks.empty();
  const auto is_over = [&](const auto& hook) {
    const auto* const ours = dynamic_cast<const BeforeHooks*>(hook.get());
    is_there = is_there || (ours && ours->tells(listener, accumulator.get()));
    return ours && ours->is_over();
  };
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(), is_over), hooks.end());
  if (!is_there) hooks.insert(hooks.begin(), std::make_unique<BeforeHooks>(listener, accumulator.get()));
}

bool is_of_listener(const torch::autograd::FunctionPreHook& hook) {
  return dynamic_cast<const BeforeHooks*>(&hook) != nullptr;
}

bool listen_last(const Accumulator& accumulator, const Listener* listener) {
  auto& hooks = accumulator->post_hooks();
  if (hooks.size() == 1) return true;
  bool is_alone = true;
  auto own = hooks.end();
  for (auto hook = hooks.begin(); hook != hooks.end(); ++hook) {
    const auto* const ours = dynamic_cast<const AfterAccumulation*>(hook->get());
    const auto other = ours ? ours->listener() : nullptr;
    if (other.get() == listener) {
      own = hook;
    } else if (other && other->is_at_work()) {
      is_alone = false;
    }
  }
  if (own != hooks.end()) std::rotate(own, own + 1, hooks.end());
  return is_alone;
}

void collect_garbage() {
  if (!Py_IsInitialized()) return;
  const pybind11::gil_scoped_acquire gil;
  PyGC_Collect();
}

void listen_to_output(const at::Tensor& output, const std::weak_ptr<Listener>& listener) {
  if (!output.requires_grad()) return;
  output.register_hook([listener](const at::Tensor&) {
    if (const auto alive = listener.lock()) alive->before_output();
  });
}

bool accumulates_into(const std::vector<Accumulator>& accumulators) {
  return std::any_of(accumulators.begin(), accumulators.end(),
                     [](const Accumulator& accumulator) { return is_needed(accumulator.get()); });
}

int current_backward() { return torch::autograd::get_current_graph_task_id(); }

void begin_backward(const std::weak_ptr<Listener>& listener) {
  auto end = std::make_shared<EndOfBackward>(listener);
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->run(); });
}

}  // namespace torchtp::gradients
