#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

#include "backend/work.h"
#include "core/clock.h"

namespace torchtp::backend {

// How a message went. Times are of core/clock.h.
struct MessageEnd {
  std::exception_ptr error;
  int peer = -1;
  int64_t number = -1;         // from its sender to its receiver; -1: not known
  int64_t came_ns = 0;         // when the partner came to it, as that one says; 0: nobody was waited for
  int64_t waited_from_ns = 0;  // when a thread of the program began to wait for it; 0: none has
};

// A message under way, of which somebody may want to hear how it went.
class MessageWork : public TorchtpWork {
 public:
  using Observer = std::function<void(const MessageEnd&)>;
  using TorchtpWork::TorchtpWork;

  // Called once, before those who wait for the message go on; now if it has ended.
  void observe(Observer observer) {
    {
      std::lock_guard<std::mutex> lock(end_mutex_);
      if (!ended_) {
        observer_ = std::move(observer);
        return;
      }
    }
    observer(end_);
  }

 protected:
  void begin_wait() {
    int64_t none = 0;
    if (waited_from_ns_.load() == 0) waited_from_ns_.compare_exchange_strong(none, now_ns());
  }

  void complete(MessageEnd end) {
    end.waited_from_ns = waited_from_ns_.load();
    Observer observer;
    {
      std::lock_guard<std::mutex> lock(end_mutex_);
      end_ = end;
      ended_ = true;
      observer = std::move(observer_);
    }
    if (observer) observer(end);
    TorchtpWork::complete(std::move(end.error));
  }

 private:
  std::atomic<int64_t> waited_from_ns_{0};
  std::mutex end_mutex_;  // of the members below
  bool ended_ = false;
  MessageEnd end_;
  Observer observer_;
};

}  // namespace torchtp::backend
