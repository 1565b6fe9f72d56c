#include "backend/arguments.h"

#include <algorithm>
#include <utility>

namespace torchtp::backend {
namespace {

using Tensors = std::vector<at::Tensor>;

const Tensors& only_list(const std::vector<Tensors>& lists, int size, const char* what) {
  TORCH_CHECK(lists.size() == 1 && static_cast<int>(lists[0].size()) == size, "torchtp ", what,
              " takes one list with one tensor for each of the ", size, " ranks, got ",
              lists.size() == 1 ? lists[0].size() : 0, " tensors in ", lists.size(), " lists");
  return lists[0];
}

}  // namespace

const at::Tensor& only(const Tensors& tensors, const char* what) {
  TORCH_CHECK(tensors.size() == 1, "torchtp ", what, " takes one tensor a rank, got ", tensors.size());
  check_tensor(tensors[0], what);
  return tensors[0];
}

const Tensors& one_for_each_rank(const std::vector<Tensors>& lists, int size, const at::Tensor& like,
                                 const char* what) {
  const Tensors& list = only_list(lists, size, what);
  for (const at::Tensor& tensor : list) check_like(tensor, like.numel(), like.scalar_type(), what);
  return list;
}

const Tensors& pieces_of_ranks(const std::vector<Tensors>& lists, int size, int rank, const at::Tensor& own,
                               const char* what) {
  const Tensors& list = only_list(lists, size, what);
  for (int r = 0; r < size; ++r) {
    check_like(list[r], r == rank ? own.numel() : list[r].numel(), own.scalar_type(), what);
  }
  return list;
}

bool all_of_one_length(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.numel() == tensors[0].numel(); });
}

void check_no_lists(const std::vector<Tensors>& lists, const char* what) {
  TORCH_CHECK(lists.empty() || (lists.size() == 1 && lists[0].empty()), "torchtp ", what,
              ": only the root passes a list of tensors");
}

void check_same_length(const Tensors& outputs, const Tensors& inputs, const char* what) {
  TORCH_CHECK(outputs.size() == inputs.size(), "torchtp ", what, " takes as many outputs as inputs, got ",
              outputs.size(), " and ", inputs.size());
}

bool share_memory(const Tensors& tensors) {
  if (tensors.size() < 2) return false;
  std::vector<std::pair<const char*, const char*>> spans;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const char* begin = static_cast<const char*>(tensor.const_data_ptr());
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    spans.emplace_back(begin, begin + (last + 1) * tensor.element_size());
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) return true;
  }
  return false;
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
