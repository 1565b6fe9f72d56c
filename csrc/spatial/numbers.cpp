#include "spatial/numbers.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

namespace torchtp::spatial {

#define TORCHTP_DISPATCH(TYPE, ...) \
  AT_DISPATCH_V2(TYPE, "norm", AT_WRAP(__VA_ARGS__), AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16)

Numbers::Numbers(const at::Tensor& tensor) {
  rows_ = tensor.dim() == 2 ? tensor.size(0) : 1;
  columns_ = tensor.dim() == 2 ? tensor.size(1) : tensor.numel();
  if (!tensor.is_cpu()) {
    tensor_ = tensor.to(at::kDouble).reshape({rows_, columns_});
    return;
  }
  const at::Tensor dense = tensor.contiguous();
  values_.resize(size());
  TORCHTP_DISPATCH(dense.scalar_type(), [&] {
    const scalar_t* data = dense.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < size(); ++i) values_[i] = static_cast<double>(data[i]);
  });
}

Numbers Numbers::filled(int64_t rows, int64_t columns, double value, const Numbers& like) {
  if (!like.on_cpu()) return Numbers(at::full({rows, columns}, value, like.tensor_.options()));
  Numbers out(rows, columns);
  std::fill(out.values_.begin(), out.values_.end(), value);
  return out;
}

Numbers Numbers::join(std::initializer_list<Numbers> parts) {
  if (!parts.begin()->on_cpu()) {
    std::vector<at::Tensor> tensors;
    for (const Numbers& part : parts) tensors.push_back(part.tensor_);
    return Numbers(at::cat(tensors, 1));
  }
  int64_t columns = 0;
  for (const Numbers& part : parts) columns += part.columns_;
  Numbers out(parts.begin()->rows_, columns);
  double* next = out.data();
  for (int64_t row = 0; row < out.rows_; ++row) {
    for (const Numbers& part : parts) next = std::copy_n(&part.values_[row * part.columns_], part.columns_, next);
  }
  return out;
}

Numbers Numbers::view(int64_t rows, int64_t columns) const {
  TORCH_INTERNAL_ASSERT(rows * columns == size());
  Numbers out = *this;
  out.rows_ = rows;
  out.columns_ = columns;
  if (!on_cpu()) out.tensor_ = tensor_.reshape({rows, columns});
  return out;
}

Numbers Numbers::columns(int64_t first, int64_t count) const {
  if (!on_cpu()) return Numbers(tensor_.narrow(1, first, count));
  Numbers out(rows_, count);
  for (int64_t row = 0; row < rows_; ++row)
    std::copy_n(values_.data() + row * columns_ + first, count, out.data() + row * count);
  return out;
}

Numbers Numbers::sum_rows() const {
  if (!on_cpu()) return Numbers(tensor_.sum(0, true));
  Numbers out(1, columns_);
  for (int64_t i = 0; i < size(); ++i) out.values_[i % columns_] += values_[i];
  return out;
}

Numbers Numbers::sum_members(int64_t num_groups) const {
  const int64_t members = columns_ / num_groups;
  if (!on_cpu()) return Numbers(tensor_.reshape({rows_, num_groups, members}).sum(2));
  Numbers out(rows_, num_groups);
  for (int64_t i = 0; i < size(); ++i) out.values_[i / members] += values_[i];
  return out;
}

Numbers Numbers::repeat_for_members(int64_t num_members) const {
  if (!on_cpu()) return Numbers(tensor_.repeat_interleave(num_members, 1));
  Numbers out(rows_, columns_ * num_members);
  for (int64_t i = 0; i < out.size(); ++i) out.values_[i] = values_[i / num_members];
  return out;
}

Numbers Numbers::by_member(int64_t num_groups) const {
  const int64_t members = columns_ / num_groups;
  if (!on_cpu()) {
    return Numbers(tensor_.reshape({rows_ * num_groups, members}).t());
  }
  Numbers out(members, rows_ * num_groups);
  for (int64_t i = 0; i < size(); ++i) out.values_[i % members * out.columns_ + i / members] = values_[i];
  return out;
}

at::Tensor Numbers::to_tensor(at::ScalarType type, at::IntArrayRef sizes) const {
  if (!on_cpu()) return tensor_.reshape(sizes).to(type);
  at::Tensor out = at::empty(sizes, at::TensorOptions().dtype(type));
  write(out);
  return out;
}

void Numbers::write(const at::Tensor& tensor) const {
  TORCH_INTERNAL_ASSERT(tensor.numel() == size());
  if (!on_cpu()) {
    tensor.copy_(tensor_.reshape(tensor.sizes()));
  } else if (!tensor.is_contiguous()) {
    tensor.copy_(to_tensor(tensor.scalar_type(), tensor.sizes()));
  } else {
    TORCHTP_DISPATCH(tensor.scalar_type(), [&] {
      scalar_t* data = tensor.mutable_data_ptr<scalar_t>();
      for (int64_t i = 0; i < size(); ++i) data[i] = static_cast<scalar_t>(values_[i]);
    });
  }
}

#undef TORCHTP_DISPATCH

}  // namespace torchtp::spatial
