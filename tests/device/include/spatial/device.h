#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include "kernels/block_program.h"

// In place of csrc/spatial/device.h: the device is PrivateUse1, see device.cpp.
namespace torchtp::spatial {

inline bool is_on_device(const at::Tensor& tensor) { return tensor.is_privateuseone(); }

inline bool has_cuda_kernels(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return is_on_device(tensor) && (type == at::kFloat || type == at::kHalf || type == at::kBFloat16);
}

inline size_t most_shared_bytes(const at::Tensor&) { return kernels::kMostSharedBytes; }

class OnDevice {
 public:
  explicit OnDevice(const at::Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
};

}  // namespace torchtp::spatial

#define TORCHTP_CUDA_TYPES at::kFloat, at::kHalf, at::kBFloat16
