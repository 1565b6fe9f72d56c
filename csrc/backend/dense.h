#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "core/contents.h"

namespace torchtp::backend {

// In no place: each of two hosts may write what the other has sent before it has sent its own.
constexpr size_t kNowhere = static_cast<size_t>(-1);

// Memory of a tensor or of a part of one.
struct Span {
  const std::byte* data;
  size_t num_bytes;
};

// The elements of a CPU tensor in one piece, in order: the tensor's own memory, or a copy where it has another layout.
class Dense {
 public:
  // With `load` false the copy starts uninitialised: for outputs that are written whole.
  Dense(const at::Tensor& tensor, bool load);

  std::byte* data() const { return static_cast<std::byte*>(memory_.data_ptr()); }
  size_t num_bytes() const { return memory_.nbytes(); }
  Contents contents() const { return {num_bytes(), static_cast<uint8_t>(memory_.scalar_type())}; }
  const at::Tensor& memory() const { return memory_; }
  Span span() const { return {data(), num_bytes()}; }
  // Goes on in a copy if it lies over one of `others` otherwise than exactly on others[in_place]: ranks read and write
  // a call's memory in no certain order, so what is written to one must not change what is read from the other.
  void keep_apart(const std::vector<Span>& others, size_t in_place);
  // Goes on in a copy that is uninitialised, for an output that is written whole.
  void leave_tensor();
  // Puts a copy's elements back into the tensor.
  void store();

 private:
  at::Tensor tensor_;
  at::Tensor memory_;
};

// Also a tensor made in inference mode, which may be written to in that mode alone: the thread that runs a call, or the
// place that waits for it, need not be in it.
void overwrite(const at::Tensor& tensor, const at::Tensor& contents);

inline std::byte* bytes_of(const at::Tensor& dense) { return static_cast<std::byte*>(dense.data_ptr()); }

// Throws, naming `what`, unless a collective can read and write the tensor: defined, strided, in memory of the CPU or
// of a CUDA device.
void check_tensor(const at::Tensor& tensor, const char* what);

// Throws where elements of a dense tensor share memory.
void check_writable(const at::Tensor& output, const char* what);

// Throws unless `tensor` has `count` elements of `dtype`.
void check_like(const at::Tensor& tensor, int64_t count, at::ScalarType dtype, const char* what);

}  // namespace torchtp::backend
