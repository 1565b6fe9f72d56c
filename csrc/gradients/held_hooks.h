#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace torchtp::gradients {

// The hook of torchtp's own among those of users: it makes a gradient plain that comes as another kind of tensor.
struct OwnHook {
  std::function<bool(const at::Tensor&)> is_alone_on;  // asked of a parameter that has hooks of its gradient
  std::function<at::Tensor(const at::Tensor&)> call;
  // Has Python make its table of a parameter's hooks, if there is none yet: when it does, it throws away those of C++.
  std::function<void(const at::Tensor&)> make_table;
};

// What `hook` makes of a gradient that is not plain, if there is such a hook; else the gradient.
at::Tensor made_plain(const OwnHook& hook, const at::Tensor& gradient);

// What users have hooked on a parameter, taken off it while a pass runs, so that hooks see the mean over the ranks and
// not what this rank adds to it. Put back at the end of its life at the latest.
class HeldHooks {
 public:
  // With `of_gradient` also those of Tensor.register_hook, which may give another gradient; else only those that run
  // after accumulation. Nothing where there is none. Takes Python's lock.
  static std::unique_ptr<HeldHooks> of(const at::Tensor& parameter, bool of_gradient, const OwnHook& own_hook);
  explicit HeldHooks(const at::Tensor& parameter) : parameter_(parameter) {}  // none yet, see `of`
  HeldHooks(const HeldHooks&) = delete;
  HeldHooks& operator=(const HeldHooks&) = delete;
  ~HeldHooks() { put_back(); }

  // Puts hooks back and calls them on the parameter's gradient as it is now.
  void run();

 private:
  using Hook = torch::autograd::FunctionPreHook;

  void take(std::unique_ptr<Hook>& hook, std::unique_ptr<Hook> stand_in);
  void put_back();
  void run_of_gradient();

  const at::Tensor parameter_;
  // Each with what stands in its place: autograd may be at the hooks of this very parameter, so they stay as many.
  std::vector<std::pair<const Hook*, std::unique_ptr<Hook>>> of_gradient_;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> after_accumulation_;
  at::Tensor before_;  // what the gradient was, for hooks of what was added to it
};

}  // namespace torchtp::gradients
