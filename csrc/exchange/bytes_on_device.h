#pragma once

#include <map>
#include <mutex>

#include "exchange/device_exchange.h"
#include "exchange/exchange.h"
#include "exchange/halo_device.h"

namespace torchtp::exchange {

// Bytes of the host by way of a device's exchange, so that it can be held against what every exchange must do. Copies
// and waits at every step.
class BytesOnDevice final : public Exchange {
 public:
  BytesOnDevice(std::shared_ptr<DeviceExchange> exchange, std::shared_ptr<HaloDevice> device)
      : exchange_(std::move(exchange)), device_(std::move(device)) {}

  int rank() const override { return exchange_->rank(); }
  int size() const override { return exchange_->size(); }
  uint64_t start(std::vector<Send> sends, std::vector<Receive> receives) override;
  void finish(uint64_t ticket) override;

 private:
  struct Arriving {
    Receive receive;
    std::shared_ptr<std::byte> memory, layout;
  };

  const std::shared_ptr<DeviceExchange> exchange_;
  const std::shared_ptr<HaloDevice> device_;
  std::mutex mutex_;
  std::map<uint64_t, std::vector<Arriving>> arriving_;
};

}  // namespace torchtp::exchange
