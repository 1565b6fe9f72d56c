#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/device_choice.h"
#include "exchange/device_exchange.h"
#include "exchange/exchange.h"
#include "exchange/halo_device.h"

namespace torchtp::backend {

using exchange::DeviceKind;

// The exchanges of one group, one a device. kAuto is what TORCHTP_DEVICE_EXCHANGE says, by default what the devices can
// do. They are made when the first tensor of that device has something to exchange. That is collective, and cannot be
// captured in a graph. Thread-safe.
class DeviceExchanges {
 public:
  // Keeps neither the group nor its exchange of the CPU alive.
  DeviceExchanges(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string group_name, DeviceKind kind,
                  std::weak_ptr<exchange::Exchange> host);

  // Whether tensors of the CPU go this way too: when a kind was chosen, so that all of it can be tested without a GPU.
  bool serves_cpu() const { return kind_ != DeviceKind::kAuto && kind_ != DeviceKind::kNone; }
  std::shared_ptr<exchange::DeviceExchange> get(c10::Device device);

  // The kernels that its exchanges of that device run.
  static std::shared_ptr<exchange::HaloDevice> kernels(c10::Device device);

  struct Made {
    std::string device, why;  // why: what keeps better ones from being used
    std::shared_ptr<exchange::DeviceExchange> exchange;
  };
  std::vector<Made> made();

 private:
  Made make(c10::Device device);
  Made make_on_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  Made make_on_cuda(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device);

  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  const std::string group_name_;
  const DeviceKind kind_;
  const std::weak_ptr<exchange::Exchange> host_;
  std::mutex mutex_;
  std::vector<Made> made_;
};

}  // namespace torchtp::backend
