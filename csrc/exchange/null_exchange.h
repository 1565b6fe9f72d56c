#pragma once

#include "exchange/device_exchange.h"
#include "exchange/exchange.h"

namespace torchtp::exchange {

// Moves nothing: halos stay what the memory held. Results are wrong and time is the least an exchange can cost, which
// is what benchmarks compare with.
class NullExchange : public Exchange {
 public:
  NullExchange(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t start(std::vector<Send>, std::vector<Receive>) override { return 0; }
  void finish(uint64_t) override {}

 private:
  const int rank_;
  const int size_;
};

// The same between devices. What should stay where it arrives arrives nowhere, so nothing may stay.
class NullDeviceExchange : public DeviceExchange {
 public:
  NullDeviceExchange(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t start(std::vector<DeviceSend>, std::vector<DeviceReceive>, Stream) override { return 0; }
  std::vector<const std::byte*> finish(uint64_t, Stream) override { return {}; }
  void release(uint64_t, Stream) override {}
  int64_t largest_left() const override { return -1; }
  void check() override {}
  std::string name() const override { return "none"; }
  size_t memory_bytes() const override { return 0; }

 private:
  const int rank_;
  const int size_;
};

}  // namespace torchtp::exchange
