#include "backend/message_work.h"

#include <utility>

#include "core/clock.h"

namespace torchtp::backend {

void MessageWork::observe(Observer observer) {
  {
    std::lock_guard<std::mutex> lock(end_mutex_);
    if (!ended_) {
      observer_ = std::move(observer);
      return;
    }
  }
  observer(end_);
}

bool MessageWork::advance() {
  {
    std::lock_guard<std::mutex> lock(claim_mutex_);
    if (claimed_) return true;
    if (!is_there()) return false;
    claimed_ = true;
  }
  finish_claimed();
  return true;
}

void MessageWork::fail(std::exception_ptr error) {
  if (claim()) complete({as_dist_error(std::move(error))});
}

bool MessageWork::isCompleted() {
  advance();
  return Work::isCompleted();
}

bool MessageWork::claim() {
  std::lock_guard<std::mutex> lock(claim_mutex_);
  return !std::exchange(claimed_, true);
}

void MessageWork::begin_wait() {
  int64_t none = 0;
  if (waited_from_ns_.load() == 0) waited_from_ns_.compare_exchange_strong(none, now_ns());
}

void MessageWork::complete(MessageEnd end) {
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

}  // namespace torchtp::backend
