#include "gradients/captured.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace torchtp::gradients {
namespace {

using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

at::Tensor mean_of(const Collective& collective, const at::Tensor& gradient) {
  at::NoGradGuard no_grad;
  at::Tensor mean = gradient.detach().clone(at::MemoryFormat::Contiguous);
  const at::Tensor buffer = (mean.is_complex() ? at::view_as_real(mean) : mean).view({-1});
  collective.start_mean(buffer)->wait();
  return mean;
}

class MeanHook : public FunctionPreHook {
 public:
  MeanHook(Collective collective, OwnHook own_hook, CapturedGradients::IsCut is_cut, int task)
      : collective_(std::move(collective)), own_hook_(std::move(own_hook)), is_cut_(std::move(is_cut)), task_(task) {}
  variable_list operator()(const variable_list& gradients) override {
    if (torch::autograd::get_current_graph_task_id() != task_ || !gradients.at(0).defined()) return gradients;
    const at::Tensor own = made_plain(own_hook_, gradients.at(0));
    if (own.is_same(gradients.at(0)) && !is_cut_()) return gradients;  // another rank need not take it
    TORCH_CHECK(own.layout() == at::kStrided, "gradients: torch.autograd.grad of a parameter whose gradient is ",
                own.layout(), " is not averaged over the ranks of an image; use a dense one (sparse=False)");
    const at::Tensor mean = mean_of(collective_, own);
    // The value is the mean, the graph this rank's own, as in Reducer::hand_out.
    return {at::GradMode::is_enabled() && own.requires_grad() ? mean + (own - own.detach()) : mean};
  }

 private:
  const Collective collective_;
  const OwnHook own_hook_;
  const CapturedGradients::IsCut is_cut_;
  const int task_;
};

// Hooks for as long as one call of torch.autograd.grad lasts.
class HooksOfCall {
 public:
  HooksOfCall() = default;
  HooksOfCall(const HooksOfCall&) = delete;
  HooksOfCall& operator=(const HooksOfCall&) = delete;
  ~HooksOfCall() { remove(); }

  // Before those of users, which then see the mean.
  void add(const at::Tensor& parameter, std::unique_ptr<FunctionPreHook> hook) {
    hooked_.emplace_back(parameter, hook.get());
    auto& hooks = torch::autograd::impl::hooks(parameter);
    hooks.insert(hooks.begin(), std::move(hook));
  }
  void remove() {
    for (const auto& [parameter, mine] : std::exchange(hooked_, {})) {
      auto& hooks = torch::autograd::impl::hooks(parameter);
      const FunctionPreHook* const wanted = mine;
      const auto is_mine = [wanted](const auto& hook) { return hook.get() == wanted; };
      hooks.erase(std::remove_if(hooks.begin(), hooks.end(), is_mine), hooks.end());
    }
  }

 private:
  std::vector<std::pair<at::Tensor, const FunctionPreHook*>> hooked_;
};

}  // namespace

CapturedGradients::CapturedGradients(std::vector<at::Tensor> parameters,
                                     const c10::intrusive_ptr<c10d::ProcessGroup>& group, OwnHook own_hook,
                                     IsCut is_cut)
    : parameters_(std::move(parameters)),
      collective_(group),
      own_hook_(std::move(own_hook)),
      is_cut_(std::move(is_cut)) {}

void CapturedGradients::begin() {
  std::call_once(begun_, [this] {
    const auto* planned = torch::autograd::get_current_graph_task_exec_info();
    if (!planned || planned->empty()) return;
    const int task = torch::autograd::get_current_graph_task_id();
    auto hooks = std::make_shared<HooksOfCall>();
    for (const at::Tensor& parameter : parameters_) {
      if (!parameter.requires_grad()) continue;
      const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
      const auto found = accumulator ? planned->find(accumulator.get()) : planned->end();
      if (found == planned->end() || !found->second.captures_) continue;
      if (own_hook_.make_table) own_hook_.make_table(parameter);
      hooks->add(parameter, std::make_unique<MeanHook>(collective_, own_hook_, is_cut_, task));
    }
    torch::autograd::Engine::get_default_engine().queue_callback([hooks] { hooks->remove(); });
  });
}

}  // namespace torchtp::gradients
