#pragma once

#include <ATen/core/Tensor.h>

namespace torchtp::gradients {

// While autograd's engine adds `gradient` to what has come before for the same tensor: whether that tensor is of a
// subclass with a dispatch of its own, a DTensor say. True as well where the node that gave it gives others of that
// shape to such a tensor: the engine does not tell for which it adds.
bool is_for_subclass(const at::Tensor& gradient);

}  // namespace torchtp::gradients
