#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "backend/lifetime.h"

namespace torchtp::backend {

// The process groups of this process that are still there, for its end: once Python has begun to end, a thread that
// drops a tensor may find no Python any more, and ends the process with an error. Thread-safe.
class OpenGroups {
 public:
  void add(const std::shared_ptr<Lifetime>& group);
  // Ends all, as Lifetime::end, and leaves them side by side: between hosts a farewell takes its time. Goes on with the
  // others where one throws, then throws that.
  void end(const std::string& error);

 private:
  std::mutex mutex_;
  std::list<std::weak_ptr<Lifetime>> groups_;
};

}  // namespace torchtp::backend
