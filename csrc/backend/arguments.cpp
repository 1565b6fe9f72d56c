#include "backend/arguments.h"

namespace torchtp::backend {
namespace {

using Tensors = std::vector<at::Tensor>;

}  // namespace

const at::Tensor& only(const Tensors& tensors, const char* what) {
  TORCH_CHECK(tensors.size() == 1, "torchtp ", what, " takes one tensor a rank, got ", tensors.size());
  check_tensor(tensors[0], what);
  return tensors[0];
}

const Tensors& one_for_each_rank(const std::vector<Tensors>& lists, int size, const at::Tensor& like,
                                 const char* what) {
  TORCH_CHECK(lists.size() == 1 && static_cast<int>(lists[0].size()) == size, "torchtp ", what,
              " takes one list with one tensor for each of the ", size, " ranks, got ",
              lists.size() == 1 ? lists[0].size() : 0, " tensors in ", lists.size(), " lists");
  for (const at::Tensor& tensor : lists[0]) check_like(tensor, like.numel(), like.scalar_type(), what);
  return lists[0];
}

void check_no_lists(const std::vector<Tensors>& lists, const char* what) {
  TORCH_CHECK(lists.empty() || (lists.size() == 1 && lists[0].empty()), "torchtp ", what,
              ": only the root passes a list of tensors");
}

void check_same_length(const Tensors& outputs, const Tensors& inputs, const char* what) {
  TORCH_CHECK(outputs.size() == inputs.size(), "torchtp ", what, " takes as many outputs as inputs, got ",
              outputs.size(), " and ", inputs.size());
}

int64_t total_numel(const Tensors& tensors) {
  int64_t total = 0;
  for (const at::Tensor& tensor : tensors) total += tensor.numel();
  return total;
}

at::ScalarType dtype_of(const Tensors& tensors) {
  return tensors.empty() ? at::ScalarType::Undefined : tensors[0].scalar_type();
}

}  // namespace torchtp::backend
