#include "backend/dense.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace torchtp::backend {

Dense::Dense(const at::Tensor& tensor, bool load) : tensor_(tensor), memory_(tensor) {
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) return;
  memory_ = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  if (load) memory_.copy_(tensor);
}

void Dense::keep_apart(const std::vector<Span>& others, size_t in_place) {
  const Span mine = span();
  for (size_t i = 0; i < others.size(); ++i) {
    const Span& other = others[i];
    if (i == in_place && other.data == mine.data && other.num_bytes == mine.num_bytes) continue;
    if (mine.data >= other.data + other.num_bytes || other.data >= mine.data + mine.num_bytes) continue;
    memory_ = memory_.clone();
    return;
  }
}

void Dense::leave_tensor() {
  if (memory_.is_same(tensor_)) memory_ = at::empty_like(tensor_);
}

void Dense::store() { overwrite(tensor_, memory_); }

void overwrite(const at::Tensor& tensor, const at::Tensor& contents) {
  if (contents.is_same(tensor)) return;
  std::optional<c10::InferenceMode> inference;
  if (tensor.is_inference()) inference.emplace();
  tensor.copy_(contents);
}

void check_tensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.defined(), "torchtp ", what, ": the tensor is undefined");
  TORCH_CHECK(tensor.layout() == at::kStrided, "torchtp ", what, " takes dense (strided) tensors, got layout ",
              tensor.layout(), "; make it dense with to_dense()");
  TORCH_CHECK(tensor.device().is_cpu() || tensor.device().is_cuda(), "torchtp ", what,
              " works on CPU and CUDA tensors, got a tensor on ", tensor.device());
  // A DTensor in a list of lists, which PyTorch does not look into when it dispatches, comes as far as this.
  TORCH_CHECK(tensor.numel() == 0 || tensor.storage().data() != nullptr, "torchtp ", what,
              " takes tensors that have data, got one of shape ", tensor.sizes(),
              " without; of a DTensor pass to_local() or full_tensor()");
}

void check_writable(const at::Tensor& output, const char* what) {
  if (output.layout() != at::kStrided) return;
  TORCH_CHECK(at::has_internal_overlap(output) != at::MemOverlap::Yes, "torchtp ", what,
              " writes to a tensor, and elements of this tensor share memory (sizes ", output.sizes(), ", strides ",
              output.strides(), "); pass a clone()");
}

void check_like(const at::Tensor& tensor, int64_t count, at::ScalarType dtype, const char* what) {
  check_tensor(tensor, what);
  TORCH_CHECK(tensor.scalar_type() == dtype, "torchtp ", what, ": all tensors of a call must have one dtype, got ",
              dtype, " and ", tensor.scalar_type());
  TORCH_CHECK(tensor.numel() == count, "torchtp ", what, ": expected a tensor of ", count, " elements, got ",
              tensor.numel(), " (shape ", tensor.sizes(), ")");
}

}  // namespace torchtp::backend
