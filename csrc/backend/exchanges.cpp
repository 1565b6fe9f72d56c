#include "backend/exchanges.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <map>
#include <mutex>

#include "backend/group_exchange.h"
#include "backend/torchtp_backend.h"

namespace torchtp::backend {
namespace {

std::shared_ptr<exchange::Exchange> exchange_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  for (const c10::Device& device : group->getDeviceTypes()) {
    if (!device.is_cpu()) continue;
    // Where TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend, this is null and the wrapper's point-to-point calls
    // serve.
    auto* own = dynamic_cast<TorchtpBackend*>(group->getBackend(device.type()).get());
    if (own != nullptr) return own->exchange();
  }
  return std::make_shared<GroupExchange>(group);
}

// Beside c10d's own registry of names: what belongs to a group as long as it is the one of that name.
class SpatialGroups {
 public:
  SpatialGroup get(const std::string& name) {
    const auto group = c10d::resolve_process_group(name);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(name);
    if (found != entries_.end() && found->second.group.lock().get() == group.get()) return found->second.spatial;
    Entry entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group),
                {group->getRank(), group->getSize(), exchange_of(group), std::make_shared<PullPlans>(),
                 std::make_shared<Traffic>()}};
    return entries_.insert_or_assign(name, std::move(entry)).first->second.spatial;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    SpatialGroup spatial;
  };
  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
};

}  // namespace

SpatialGroup spatial_group(const std::string& group_name) {
  static SpatialGroups groups;
  return groups.get(group_name);
}

}  // namespace torchtp::backend
