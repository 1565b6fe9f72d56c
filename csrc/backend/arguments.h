#pragma once

#include <vector>

#include "backend/dense.h"

namespace torchtp::backend {

// A collective's only tensor.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what);

// The list with one tensor for each rank, all like `like`.
const std::vector<at::Tensor>& one_for_each_rank(const std::vector<std::vector<at::Tensor>>& lists, int size,
                                                 const at::Tensor& like, const char* what);

// The same, but the tensors of the other ranks may be of other lengths, which all ranks must pass alike.
const std::vector<at::Tensor>& pieces_of_ranks(const std::vector<std::vector<at::Tensor>>& lists, int size, int rank,
                                               const at::Tensor& own, const char* what);

bool all_of_one_length(const std::vector<at::Tensor>& tensors);

// What the ranks that are not the root pass.
void check_no_lists(const std::vector<std::vector<at::Tensor>>& lists, const char* what);

void check_same_length(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* what);

// Whether two of the tensors may share elements.
bool share_memory(const std::vector<at::Tensor>& tensors);

int64_t total_numel(const std::vector<at::Tensor>& tensors);

// The first tensor's; Undefined where there are no tensors.
at::ScalarType dtype_of(const std::vector<at::Tensor>& tensors);

inline std::vector<Span> spans_of(const std::vector<Dense>& list) {
  std::vector<Span> spans;
  for (const Dense& dense : list) spans.push_back(dense.span());
  return spans;
}

// Those of equal parts of one tensor.
inline std::vector<Span> spans_of(const Dense& whole, int num_parts) {
  std::vector<Span> spans;
  const size_t part_bytes = whole.num_bytes() / num_parts;
  for (int r = 0; r < num_parts; ++r) spans.push_back({whole.data() + r * part_bytes, part_bytes});
  return spans;
}

// Several tensors as memory; copies are put back by store(). Outputs that share memory hold what the last of them got.
class DenseList {
 public:
  DenseList(const std::vector<at::Tensor>& tensors, bool load) {
    for (const at::Tensor& tensor : tensors) list_.emplace_back(tensor, load);
    if (load || !share_memory(tensors)) return;
    for (Dense& dense : list_) dense.leave_tensor();
  }
  std::vector<std::byte*> outputs() const {
    std::vector<std::byte*> pointers;
    for (const Dense& dense : list_) pointers.push_back(dense.data());
    return pointers;
  }
  std::vector<const std::byte*> inputs() const {
    std::vector<const std::byte*> pointers;
    for (const Dense& dense : list_) pointers.push_back(dense.data());
    return pointers;
  }
  std::vector<Span> spans() const { return spans_of(list_); }
  std::vector<Dense>& all() { return list_; }
  void store() {
    for (Dense& dense : list_) dense.store();
  }

 private:
  std::vector<Dense> list_;
};

// Equal parts of one buffer, one for each rank.
template <typename Byte>
std::vector<Byte*> parts(Byte* data, size_t part_bytes, int num_parts) {
  std::vector<Byte*> pointers(num_parts);
  for (int r = 0; r < num_parts; ++r) pointers[r] = data + r * part_bytes;
  return pointers;
}

}  // namespace torchtp::backend
