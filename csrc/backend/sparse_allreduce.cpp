#include "backend/sparse_allreduce.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "backend/dense.h"

namespace torchtp::backend {
namespace {

// Row r of the result is `mine` of rank r.
at::Tensor gather_rows(const Call& call, const at::Tensor& mine) {
  std::vector<int64_t> sizes = mine.sizes().vec();
  sizes.insert(sizes.begin(), call.engine.size());
  at::Tensor all = at::empty(sizes, mine.options());
  std::vector<std::byte*> rows;
  for (int r = 0; r < call.engine.size(); ++r)
    rows.push_back(static_cast<std::byte*>(all.data_ptr()) + r * mine.nbytes());
  call.engine.allgather(call.sequence, static_cast<const std::byte*>(mine.data_ptr()), rows, mine.numel(),
                        mine.scalar_type());
  return all;
}

// `rows` with zeros up to `num_rows`.
at::Tensor pad_rows(const at::Tensor& rows, int64_t num_rows) {
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes[0] = num_rows;
  at::Tensor padded = at::zeros(sizes, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  return padded;
}

}  // namespace

void check_sparse(const at::Tensor& tensor, collectives::ReduceOp op) {
  TORCH_CHECK(tensor.layout() == at::kSparse, "torchtp allreduce takes dense and sparse COO tensors, got layout ",
              tensor.layout());
  TORCH_CHECK(op == collectives::ReduceOp::kSum, "torchtp allreduce of sparse tensors has no reduce op but SUM, got ",
              collectives::name_of(op));
}

void sparse_allreduce(const Call& call, const at::Tensor& tensor) {
  const at::Tensor mine = tensor.coalesce();
  const at::Tensor indices = mine._indices().t();  // an entry is a row, as in the values
  const at::Tensor values = mine._values();
  at::Tensor count = at::empty({1}, indices.options());
  count.fill_(values.size(0));
  const at::Tensor counts = gather_rows(call, count).flatten();
  const int64_t* num_entries = counts.const_data_ptr<int64_t>();
  const int64_t most = *std::max_element(num_entries, num_entries + call.engine.size());
  const at::Tensor all_indices = gather_rows(call, pad_rows(indices, most));
  const at::Tensor all_values = gather_rows(call, pad_rows(values, most));
  std::vector<at::Tensor> index_parts, value_parts;
  for (int r = 0; r < call.engine.size(); ++r) {
    index_parts.push_back(all_indices.select(0, r).narrow(0, 0, num_entries[r]));
    value_parts.push_back(all_values.select(0, r).narrow(0, 0, num_entries[r]));
  }
  overwrite(tensor, at::sparse_coo_tensor(at::cat(index_parts).t(), at::cat(value_parts), tensor.sizes()).coalesce());
}

}  // namespace torchtp::backend
