#pragma once

#include <ATen/core/Tensor.h>

// Whether a kernel of csrc/kernels takes a tensor, and the stream it goes to. Other tensors on a device go through
// ATen.
#ifndef TORCHTP_CUDA
#include "kernels/block_program.h"

namespace torchtp::spatial {
inline bool has_cuda_kernels(const at::Tensor&) { return false; }
inline size_t most_shared_bytes(const at::Tensor&) { return kernels::kMostSharedBytes; }
}  // namespace torchtp::spatial
#else
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "kernels/device_limits_cuda.h"

namespace torchtp::spatial {

inline bool is_on_device(const at::Tensor& tensor) { return tensor.is_cuda(); }

inline bool has_cuda_kernels(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  if (!is_on_device(tensor) || (type != at::kFloat && type != at::kHalf && type != at::kBFloat16)) return false;
  return kernels::most_shared_bytes(tensor.device().index()) >= kernels::kLeastSharedBytes;
}

// What a block may have on the tensor's device, or on the CPU, where all of them run.
inline size_t most_shared_bytes(const at::Tensor& tensor) {
  return is_on_device(tensor) ? kernels::most_shared_bytes(tensor.device().index()) : kernels::kMostSharedBytes;
}

// Makes the tensor's device current for as long as it lives.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& tensor) : guard_(tensor.device()) {}
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(); }

 private:
  c10::cuda::CUDAGuard guard_;
};

}  // namespace torchtp::spatial

// Types that the kernels are compiled for.
#define TORCHTP_CUDA_TYPES at::kFloat, at::kHalf, at::kBFloat16
#endif
