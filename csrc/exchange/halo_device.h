#pragma once

#include "exchange/device_exchange.h"
#include "kernels/halo_exchange.h"

namespace torchtp::exchange {

// Where the kernels of an exchange run and its memory lies: a CUDA device (halo_device_cuda.h), or the CPU, whose
// kernels have run when a call returns.
class HaloDevice {
 public:
  virtual ~HaloDevice() = default;

  virtual void pack(const kernels::HaloPack& pack, Stream stream) = 0;
  virtual void push(const kernels::HaloPushParams& params, Stream stream) = 0;
  virtual void wait(const kernels::HaloWaitParams& params, Stream stream) = 0;
  virtual void take(const kernels::HaloTakeParams& params, Stream stream) = 0;

  // What was enqueued on the stream of the last call comes before what is enqueued on this one from here on.
  virtual void enter(Stream stream) = 0;
  // The graph that work goes into now instead of being run; 0: none.
  virtual uint64_t graph_of(Stream stream) = 0;
  // To and from memory of the device, behind what is on the stream; the copy is made when they return.
  virtual void write(void* to, const void* from, size_t num_bytes, Stream stream) = 0;
  virtual void read(void* to, const void* from, size_t num_bytes, Stream stream) = 0;
  // Behind all that was enqueued; seen by every device.
  virtual void store(uint64_t* word, uint64_t value) = 0;
  // Memory of the device, for what is enqueued on the current stream.
  virtual std::shared_ptr<std::byte> allocate(size_t num_bytes) = 0;
};

class HostHaloDevice final : public HaloDevice {
 public:
  void pack(const kernels::HaloPack& pack, Stream) override { kernels::halo_pack_cpu(pack); }
  void push(const kernels::HaloPushParams& params, Stream) override { kernels::halo_push_cpu(params); }
  void wait(const kernels::HaloWaitParams& params, Stream) override { kernels::halo_wait_cpu(params); }
  void take(const kernels::HaloTakeParams& params, Stream) override { kernels::halo_take_cpu(params); }
  void enter(Stream) override {}
  uint64_t graph_of(Stream) override { return 0; }
  void write(void* to, const void* from, size_t num_bytes, Stream) override {
    if (num_bytes > 0) std::memcpy(to, from, num_bytes);
  }
  void read(void* to, const void* from, size_t num_bytes, Stream) override {
    if (num_bytes > 0) std::memcpy(to, from, num_bytes);
  }
  void store(uint64_t* word, uint64_t value) override { kernels::HostAtomics::store_release(word, value); }
  std::shared_ptr<std::byte> allocate(size_t num_bytes) override {
    const auto bytes = std::make_shared<std::vector<std::byte>>(num_bytes);
    return {bytes, bytes->data()};
  }
};

}  // namespace torchtp::exchange
