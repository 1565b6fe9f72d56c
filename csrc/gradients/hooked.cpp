#include "gradients/hooked.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <unordered_set>
#include <vector>

namespace torchtp::gradients {

using torch::autograd::Node;

bool is_hooked(const at::Tensor& tensor, size_t most_nodes) {
  std::unordered_set<Node*> seen;
  std::vector<Node*> nodes;
  const auto reach = [&](Node* node) {
    const bool is_leaf = node == nullptr || node->num_outputs() == 0;
    if (!is_leaf && seen.insert(node).second) nodes.push_back(node);
  };
  reach(tensor.grad_fn().get());
  while (!nodes.empty() && seen.size() < most_nodes) {
    Node* const node = nodes.back();
    nodes.pop_back();
    if (!node->tensor_pre_hooks().empty() || !node->pre_hooks().empty() || !node->post_hooks().empty() ||
        !node->retains_grad_hooks().empty())
      return true;
    for (const torch::autograd::Edge& edge : node->next_edges()) reach(edge.function.get());
  }
  return false;
}

}  // namespace torchtp::gradients
