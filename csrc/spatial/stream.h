#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "exchange/device_exchange.h"

#ifdef TORCHTP_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchtp::spatial {

// The tensor's device, current for as long as this lives, and its current stream; null on the CPU.
class OnStream {
 public:
#ifdef TORCHTP_CUDA
  explicit OnStream(const at::Tensor& tensor) {
    if (!tensor.is_cuda()) return;
    guard_.emplace(tensor.device());
    stream_ = c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
  }
#else
  explicit OnStream(const at::Tensor&) {}
#endif
  exchange::Stream stream() const { return stream_; }

 private:
  exchange::Stream stream_ = nullptr;
#ifdef TORCHTP_CUDA
  std::optional<c10::cuda::CUDAGuard> guard_;
#endif
};

// Work on the current stream touches the tensor, which may have been made for another one.
inline void used_here([[maybe_unused]] const at::Tensor& tensor) {
#ifdef TORCHTP_CUDA
  if (!tensor.is_cuda() || !tensor.has_storage()) return;
  c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(),
                                                c10::cuda::getCurrentCUDAStream(tensor.device().index()));
#endif
}

}  // namespace torchtp::spatial
