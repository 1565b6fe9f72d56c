#include "backend/exchanges.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <atomic>
#include <map>
#include <mutex>

#include "backend/device_exchange_of.h"
#include "backend/device_exchanges.h"
#include "backend/group_exchange.h"
#include "backend/torchtp_backend.h"
#include "exchange/null_exchange.h"

namespace torchtp::backend {
namespace {

// Null unless the group's CPU backend is torchtp. Where TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend, the wrapper's
// point-to-point calls serve.
std::shared_ptr<exchange::Exchange> shared_memory_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  for (const c10::Device& device : group->getDeviceTypes()) {
    if (!device.is_cpu()) continue;
    auto* own = dynamic_cast<TorchtpBackend*>(group->getBackend(device.type()).get());
    if (own != nullptr) return own->exchange();
  }
  return nullptr;
}

// Beside c10d's own registry of names: what belongs to a group as long as it is the one of that name.
class SpatialGroups {
 public:
  SpatialGroup get(const std::string& name) {
    const auto group = c10d::resolve_process_group(name);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(name);
    if (found != entries_.end() && found->second.group.lock().get() == group.get()) {
      if (const auto exchange = found->second.exchange.lock()) return found->second.spatial(exchange);
    }
    Entry entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group),
                {},
                {},
                group->getRank(),
                group->getSize(),
                std::make_shared<PullPlans>(),
                std::make_shared<Traffic>(),
                {},
                false};
    const auto exchange = entry.choose(name, ExchangeKind::kAuto, DeviceKind::kAuto, group);
    drop_gone();
    return entries_.insert_or_assign(name, std::move(entry)).first->second.spatial(exchange);
  }

  void choose(const std::string& name, ExchangeKind kind, DeviceKind device) {
    get(name);
    const auto group = c10d::resolve_process_group(name);
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.at(name).choose(name, kind, device, group);
    serves_cpu_ = false;
    for (const auto& [_, entry] : entries_) serves_cpu_ = serves_cpu_ || entry.devices->serves_cpu();
  }

  // Whether any group moves halos of the CPU as a device does: nobody else looks for that.
  bool serves_cpu() const { return serves_cpu_; }

  std::shared_ptr<DeviceExchanges> devices_of(const SpatialGroup& group) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [_, entry] : entries_) {
      if (entry.traffic == group.traffic) return entry.devices;
    }
    throw Error("exchange: the process group has been destroyed");
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::weak_ptr<exchange::Exchange> exchange;  // over shared memory it belongs to the backend, and ends with it
    std::shared_ptr<exchange::Exchange> kept;    // any other knows its group weakly
    int rank;
    int size;
    std::shared_ptr<PullPlans> plans;
    std::shared_ptr<Traffic> traffic;
    std::shared_ptr<DeviceExchanges> devices;  // keeps memory on the devices
    bool planned;

    SpatialGroup spatial(const std::shared_ptr<exchange::Exchange>& locked) const {
      return {rank, size, locked, plans, traffic, planned};
    }

    std::shared_ptr<exchange::Exchange> choose(const std::string& name, ExchangeKind kind, DeviceKind device,
                                               const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) {
      kept.reset();
      planned = kind == ExchangeKind::kPlanned;
      std::shared_ptr<exchange::Exchange> chosen;
      if (kind == ExchangeKind::kAuto) chosen = shared_memory_of(process_group);
      if (!chosen && (planned || kind == ExchangeKind::kNone)) {
        kept = std::make_shared<exchange::NullExchange>(rank, size);
      } else if (!chosen) {
        kept = std::make_shared<GroupExchange>(process_group);
      }
      if (kept) chosen = kept;
      exchange = chosen;
      if (kind == ExchangeKind::kNone) device = DeviceKind::kNone;
      devices = std::make_shared<DeviceExchanges>(process_group, name, device, exchange);
      return chosen;
    }
  };

  // Of groups that have been destroyed.
  void drop_gone() {
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      entry = entry->second.group.expired() ? entries_.erase(entry) : std::next(entry);
    }
  }

  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  std::atomic<bool> serves_cpu_{false};
};

SpatialGroups& spatial_groups() {
  static SpatialGroups groups;
  return groups;
}

}  // namespace

SpatialGroup spatial_group(const std::string& group_name) { return spatial_groups().get(group_name); }

void set_exchange(const std::string& group_name, ExchangeKind kind) {
  spatial_groups().choose(group_name, kind, DeviceKind::kAuto);
}

std::shared_ptr<exchange::DeviceExchange> device_exchange_of(const SpatialGroup& group, const c10::Device& device) {
  if (device.is_meta() || (device.is_cpu() && !spatial_groups().serves_cpu())) return nullptr;
  const auto devices = spatial_groups().devices_of(group);
  return device.is_cpu() && !devices->serves_cpu() ? nullptr : devices->get(device);
}

void set_device_exchange(const std::string& group_name, DeviceKind kind) {
  spatial_groups().choose(group_name, ExchangeKind::kAuto, kind);
}

std::shared_ptr<DeviceExchanges> device_exchanges(const std::string& group_name) {
  return spatial_groups().devices_of(spatial_group(group_name));
}

}  // namespace torchtp::backend
