#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <mutex>
#include <vector>

#include "gradients/collective.h"
#include "gradients/held_hooks.h"

namespace torchtp::gradients {

// What torch.autograd.grad() gives for parameters: the mean over the ranks of a group, instead of what this rank adds
// to it. A message for each parameter that is asked for, in the order in which autograd reaches them.
class CapturedGradients : public std::enable_shared_from_this<CapturedGradients> {
 public:
  // Parameters are plain leaf tensors, each once.
  CapturedGradients(std::vector<at::Tensor> parameters, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    OwnHook own_hook);

  // Sees to gradients that are taken through `output`, as long as this lives.
  void watch(const at::Tensor& output);

 private:
  void begin();  // within a backward

  const std::vector<at::Tensor> parameters_;
  const Collective collective_;
  const OwnHook own_hook_;
  std::mutex mutex_;
  int last_task_ = -1;  // of the engine, that was seen to
};

}  // namespace torchtp::gradients
