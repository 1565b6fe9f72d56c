#include "backend/message_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"

namespace torchtp::backend {
namespace {

constexpr std::chrono::microseconds kShortestPause{50};
constexpr std::chrono::microseconds kLongestPause{2000};

void fail(MessageWork& message) {
  message.fail(std::make_exception_ptr(Error("the process group was shut down before the message arrived")));
}

}  // namespace

c10::intrusive_ptr<MessageWork> MessageWatch::add(c10::intrusive_ptr<MessageWork> message) {
  if (message->advance()) return message;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->stopping) {
      if (!thread_.joinable()) thread_ = std::thread([state = state_] { look_after(state); });
      // Where there are others it will look soon enough by itself.
      if (state_->unfinished.empty()) state_->changed.notify_one();
      state_->unfinished.push_back(message);
      return message;
    }
  }
  fail(*message);
  return message;
}

void MessageWatch::look_after(const std::shared_ptr<State>& state) {
  std::chrono::microseconds pause = kShortestPause;
  std::unique_lock<std::mutex> lock(state->mutex);
  while (!state->stopping) {
    if (state->unfinished.empty()) {
      state->changed.wait(lock, [&] { return state->stopping || !state->unfinished.empty(); });
      pause = kShortestPause;
      continue;
    }
    // Sleeping first: most messages are waited for at once, and finished by who waits.
    const size_t before = state->unfinished.size();
    if (state->changed.wait_for(lock, pause, [&] { return state->stopping; })) return;
    auto messages = std::exchange(state->unfinished, {});
    lock.unlock();
    messages.remove_if([](const c10::intrusive_ptr<MessageWork>& message) { return message->advance(); });
    lock.lock();
    state->unfinished.splice(state->unfinished.begin(), messages);
    pause = state->unfinished.size() < before ? kShortestPause : std::min(2 * pause, kLongestPause);
  }
}

void MessageWatch::stop() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  if (thread_.joinable()) {
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }
  std::list<c10::intrusive_ptr<MessageWork>> left;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    left = std::exchange(state_->unfinished, {});
  }
  for (auto& message : left) fail(*message);
}

}  // namespace torchtp::backend
