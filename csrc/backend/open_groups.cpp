#include "backend/open_groups.h"

#include <exception>
#include <utility>

namespace torchtp::backend {

void OpenGroups::add(const std::shared_ptr<Lifetime>& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  groups_.remove_if([](const std::weak_ptr<Lifetime>& each) { return each.expired(); });
  groups_.push_back(group);
}

void OpenGroups::end(const std::string& error) {
  std::list<std::weak_ptr<Lifetime>> groups;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    groups = std::exchange(groups_, {});
  }
  std::exception_ptr thrown;
  for (const auto& each : groups) {
    try {
      if (const auto group = each.lock()) group->end(error);
    } catch (...) {
      thrown = std::current_exception();
    }
  }
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace torchtp::backend
