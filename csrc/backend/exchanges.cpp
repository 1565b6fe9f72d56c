#include "backend/exchanges.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <map>
#include <mutex>

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
                false};
    const auto exchange = entry.choose(ExchangeKind::kAuto, group);
    return entries_.insert_or_assign(name, std::move(entry)).first->second.spatial(exchange);
  }

  void choose(const std::string& name, ExchangeKind kind) {
    get(name);
    const auto group = c10d::resolve_process_group(name);
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.at(name).choose(kind, group);
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
    bool planned;

    SpatialGroup spatial(const std::shared_ptr<exchange::Exchange>& locked) const {
      return {rank, size, locked, plans, traffic, planned};
    }

    std::shared_ptr<exchange::Exchange> choose(ExchangeKind kind,
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
      return chosen;
    }
  };
  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
};

SpatialGroups& spatial_groups() {
  static SpatialGroups groups;
  return groups;
}

}  // namespace

SpatialGroup spatial_group(const std::string& group_name) { return spatial_groups().get(group_name); }

void set_exchange(const std::string& group_name, ExchangeKind kind) { spatial_groups().choose(group_name, kind); }

}  // namespace torchtp::backend
