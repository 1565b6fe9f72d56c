#pragma once

#include <ATen/core/Tensor.h>

// Whether a kernel of csrc/kernels takes a tensor, and the stream it goes to. Other tensors on a device go through
// ATen.
#ifdef TORCHTP_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace torchtp::spatial {

// What a block must be able to have (block_program.h). sm_90 and sm_100 give it 227 KiB.
constexpr int kSharedBytesNeeded = 216 * 1024;

inline bool has_cuda_kernels(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  if (!tensor.is_cuda() || (type != at::kFloat && type != at::kHalf && type != at::kBFloat16)) return false;
  int shared_bytes = 0;
  const auto status =
      cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, tensor.device().index());
  return status == cudaSuccess && shared_bytes >= kSharedBytesNeeded;
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
