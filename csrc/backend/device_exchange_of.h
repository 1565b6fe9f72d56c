#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/exchanges.h"
#include "exchange/device_choice.h"
#include "exchange/device_exchange.h"

namespace c10 {
struct Device;
}

namespace torchtp::backend {

using exchange::DeviceKind;
class DeviceExchanges;

// What moves halos of such tensors, or null where the group's `exchange` does: for tensors of the CPU, unless
// set_device_exchange() was called. The first call on a device is collective.
std::shared_ptr<exchange::DeviceExchange> device_exchange_of(const SpatialGroup& group, const c10::Device& device);

// How halos of a device's tensors travel in that group from now on, and with any kind but kAuto and kNone those of the
// CPU too, so that all of it can be tested without a GPU. set_exchange() sets this back to kAuto, or kNone. Every rank
// of the group calls it at the same place, with nothing under way.
void set_device_exchange(const std::string& group_name, DeviceKind kind);

// Those made so far.
std::shared_ptr<DeviceExchanges> device_exchanges(const std::string& group_name);

}  // namespace torchtp::backend
