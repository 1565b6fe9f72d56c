#pragma once

#include <ATen/core/Tensor.h>

namespace torchtp::gradients {

// Whether what comes back for `tensor` meets a hook, of anybody's, or is kept (retain_grad) before it reaches the
// leaves that the tensor was made of. Hooks of leaves are not counted, and no more than so many nodes are looked at.
bool is_hooked(const at::Tensor& tensor, size_t most_nodes);

}  // namespace torchtp::gradients
