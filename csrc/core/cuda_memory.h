#pragma once

#ifdef TORCHTP_CUDA
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "core/error.h"

namespace torchtp {

inline void require_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not to be met again by whoever asks next
  throw Error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Makes a device current for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    require_cuda(cudaGetDevice(&before_), "current device");
    if (device != before_) require_cuda(cudaSetDevice(device), "choice of a device");
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

// Memory of the host that kernels of every device may write, zero at first.
class PinnedMemory {
 public:
  explicit PinnedMemory(size_t num_bytes) {
    require_cuda(cudaHostAlloc(&data_, num_bytes, cudaHostAllocPortable | cudaHostAllocMapped), "pinned memory");
    std::memset(data_, 0, num_bytes);
  }
  ~PinnedMemory() { cudaFreeHost(data_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// A point in a stream that another stream can be told to wait for.
class StreamEvent {
 public:
  StreamEvent() { require_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "event"); }
  ~StreamEvent() { cudaEventDestroy(event_); }
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace torchtp
#endif
