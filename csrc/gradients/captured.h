#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <mutex>
#include <vector>

#include "gradients/collective.h"
#include "gradients/held_hooks.h"

namespace torchtp::gradients {

// What one call of torch.autograd.grad() gives for parameters: the mean over the ranks of a group, instead of what this
// rank adds to it. A message for each parameter that cut images have part in, in the order in which autograd reaches
// them.
class CapturedGradients {
 public:
  // Whether the backward that runs on this thread is one of cut images, which all ranks of the group run.
  using IsCut = std::function<bool()>;

  // Parameters are plain leaf tensors, each once.
  CapturedGradients(std::vector<at::Tensor> parameters, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    OwnHook own_hook, IsCut is_cut);

  // Call within the backward, before it reaches a parameter; more than once is as good.
  void begin();

 private:
  const std::vector<at::Tensor> parameters_;
  const Collective collective_;
  const OwnHook own_hook_;
  const IsCut is_cut_;
  std::once_flag begun_;
};

}  // namespace torchtp::gradients
