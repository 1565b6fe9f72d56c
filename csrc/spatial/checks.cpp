#include "spatial/checks.h"

#include <c10/util/Exception.h>

namespace torchtp::spatial {
namespace {

bool same(const c10::SymInt& a, const c10::SymInt& b) { return a.sym_eq(b).expect_true(__FILE__, __LINE__); }

void check_place(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), op, ": the device of ", name, " is ", tensor.device(),
                    ", that of the input ", like.device(), "; move one of them");
}

}  // namespace

void check_row(const char* op, const char* name, const std::optional<at::Tensor>& row, const at::Tensor& x,
               int64_t dim) {
  if (!row || !row->defined()) return;
  TORCH_CHECK_VALUE(row->dim() == 1 && same(row->sym_size(0), x.sym_size(dim)), op, ": ", name,
                    " has one number for each of ", x.sym_size(dim), dim == 0 ? " samples" : " channels", ", got ",
                    row->sym_sizes());
  check_place(op, name, *row, x);
}

void check_sizes(const char* op, const char* name, const at::Tensor& tensor, c10::SymIntArrayRef sizes,
                 const at::Tensor& like) {
  const c10::SymIntArrayRef found = tensor.sym_sizes();
  bool fits = found.size() == sizes.size();
  for (size_t dim = 0; fits && dim < sizes.size(); ++dim) fits = same(found[dim], sizes[dim]);
  TORCH_CHECK_VALUE(fits, op, ": the sizes of ", name, " are ", sizes, " here, got ", found);
  check_place(op, name, tensor, like);
}

void check_sizes(const char* op, const char* name, const at::Tensor& tensor, at::IntArrayRef sizes,
                 const at::Tensor& like) {
  check_sizes(op, name, tensor, c10::fromIntArrayRefKnownNonNegative(sizes), like);
}

void check_list(const char* op, const char* name, at::IntArrayRef list, int64_t num_dims) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(list.size()) == num_dims, op, ": ", name, " needs a number for each of ",
                    num_dims, " spatial dims, got ", list);
}

}  // namespace torchtp::spatial
