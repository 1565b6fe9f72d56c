#include "backend/message_work.h"

#include <algorithm>
#include <utility>

#include "core/clock.h"

namespace torchtp::backend {
namespace {

constexpr std::chrono::nanoseconds kLongestAway = std::chrono::seconds(1);  // between two looks, unless it was stopped

}  // namespace

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
  wanted_ = true;
  advance();
  return Work::isCompleted();
}

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  wanted_ = limited_by_group_ = true;
  return TorchtpWork::getFuture();
}

bool MessageWork::claim() {
  std::lock_guard<std::mutex> lock(claim_mutex_);
  return !std::exchange(claimed_, true);
}

void MessageWork::begin_wait(bool own_limit) {
  int64_t none = 0;
  if (waited_from_ns_.load() == 0) waited_from_ns_.compare_exchange_strong(none, now_ns());
  wanted_ = true;
  if (!own_limit) limited_by_group_ = true;
}

std::chrono::nanoseconds MessageWork::wanted_for() {
  const int64_t now = now_ns();
  if (limited_by_group_ && looked_ns_ != 0) {
    wanted_for_ += std::min(std::chrono::nanoseconds(now - looked_ns_), kLongestAway);
  }
  looked_ns_ = now;
  return wanted_for_;
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
