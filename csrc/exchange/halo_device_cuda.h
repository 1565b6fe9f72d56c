#pragma once

#ifdef TORCHTP_CUDA
#include <functional>

#include "core/cuda_memory.h"
#include "exchange/halo_device.h"

namespace torchtp::exchange {

// The kernels on a CUDA device, which is current when its calls with a stream are made.
class CudaHaloDevice final : public HaloDevice {
 public:
  using Allocate = std::function<std::shared_ptr<std::byte>(size_t num_bytes)>;

  CudaHaloDevice(int device, Allocate allocate) : device_(device), allocate_(std::move(allocate)) {}

  void pack(const kernels::HaloPack& pack, Stream stream) override;
  void push(const kernels::HaloPushParams& params, Stream stream) override;
  void wait(const kernels::HaloWaitParams& params, Stream stream) override;
  void take(const kernels::HaloTakeParams& params, Stream stream) override;
  void enter(Stream stream) override;
  uint64_t graph_of(Stream stream) override;
  void write(void* to, const void* from, size_t num_bytes, Stream stream) override;
  void read(void* to, const void* from, size_t num_bytes, Stream stream) override;
  void store(uint64_t* word, uint64_t value) override;
  std::shared_ptr<std::byte> allocate(size_t num_bytes) override { return allocate_(num_bytes); }

 private:
  const int device_;
  const Allocate allocate_;
  const StreamEvent event_;
  Stream last_ = nullptr;
  bool entered_ = false;
};

}  // namespace torchtp::exchange
#endif
