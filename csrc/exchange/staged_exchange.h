#pragma once

#include <memory>
#include <vector>

#include "exchange/device_exchange.h"
#include "exchange/exchange.h"
#include "exchange/halo_device.h"
#include "exchange/tickets.h"

namespace torchtp::exchange {

// A device's halos by way of the host: for groups that have nothing but an exchange of the CPU. It waits for the device
// at every step, so no graph can capture it.
class StagedExchange final : public DeviceExchange {
 public:
  StagedExchange(std::shared_ptr<HaloDevice> device, std::weak_ptr<Exchange> host, int rank, int size)
      : device_(std::move(device)), host_(std::move(host)), rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t start(std::vector<DeviceSend> sends, std::vector<DeviceReceive> receives, Stream stream) override;
  std::vector<const std::byte*> finish(uint64_t ticket, Stream stream) override;
  void release(uint64_t, Stream) override {}
  // What arrives may be in another layout than its receiver's, so nothing stays.
  int64_t largest_left() const override { return -1; }
  void check() override {}
  std::string name() const override { return "staged"; }
  size_t memory_bytes() const override { return 0; }

 private:
  class HostMemory;
  struct Exchanging;

  std::shared_ptr<Exchange> host() const;

  const std::shared_ptr<HaloDevice> device_;
  const std::weak_ptr<Exchange> host_;
  const int rank_, size_;
  Tickets<std::shared_ptr<Exchanging>> under_way_;
};

}  // namespace torchtp::exchange
