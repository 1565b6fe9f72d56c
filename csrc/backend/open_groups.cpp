#include "backend/open_groups.h"

#include <exception>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "backend/gil.h"

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
  std::vector<std::thread> leaving;
  for (const auto& each : groups) {
    const auto group = each.lock();
    try {
      if (!group || !group->finish(error, {}, thrown)) continue;
    } catch (...) {
      thrown = std::current_exception();
      continue;
    }
    try {
      leaving.emplace_back([group, error] { group->leave(error); });
    } catch (const std::system_error&) {  // there is no thread left
      const GilRelease release;
      group->leave(error);
    }
  }
  {
    const GilRelease release;
    for (std::thread& each : leaving) each.join();
  }
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace torchtp::backend
