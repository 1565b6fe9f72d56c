#include "backend/exchanges.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <map>
#include <mutex>

#include "backend/group_exchange.h"

namespace torchtp::backend {
namespace {

// Beside c10d's own registry of names: what belongs to a group as long as it is the one of that name.
class SpatialGroups {
 public:
  SpatialGroup get(const std::string& name) {
    const auto group = c10d::resolve_process_group(name);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(name);
    if (found != entries_.end() && found->second.group.lock().get() == group.get()) return found->second.spatial;
    Entry entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group),
                {group->getRank(), group->getSize(), std::make_shared<GroupExchange>(group),
                 std::make_shared<PullPlans>(), std::make_shared<Traffic>()}};
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
