#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <mutex>
#include <vector>

#include "exchange/device_exchange.h"
#include "exchange/halo_device.h"
#include "exchange/tickets.h"

namespace torchtp::backend {

// A device's halos by point-to-point calls of a c10d group that takes its tensors (NCCL, or what torchtp has inside for
// them): one message a peer each way, all of an exchange in one group of calls where the backend has such.
class GroupedExchange final : public exchange::DeviceExchange {
 public:
  GroupedExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device,
                  std::shared_ptr<exchange::HaloDevice> kernels);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t start(std::vector<exchange::DeviceSend> sends, std::vector<exchange::DeviceReceive> receives,
                 exchange::Stream stream) override;
  std::vector<const std::byte*> finish(uint64_t ticket, exchange::Stream stream) override;
  void release(uint64_t, exchange::Stream) override {}
  // What arrives may be in another layout than its receiver's, so nothing stays.
  int64_t largest_left() const override { return -1; }
  void check() override {}
  std::string name() const override { return "grouped"; }
  size_t memory_bytes() const override { return 0; }

 private:
  struct Exchanging;

  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::Device device_;
  const std::shared_ptr<exchange::HaloDevice> kernels_;
  const int rank_, size_;
  std::mutex mutex_;
  exchange::Tickets<std::shared_ptr<Exchanging>> under_way_;
};

}  // namespace torchtp::backend
