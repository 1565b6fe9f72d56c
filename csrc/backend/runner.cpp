#include "backend/runner.h"

#include <utility>

#include "backend/signal_handlers.h"
#include "core/fork_guard.h"

namespace torchtp::backend {

thread_local Runner::State* Runner::own_state_ = nullptr;

Runner::Runner() : state_(std::make_shared<State>()) {}

Runner::~Runner() { stop(); }

bool Runner::submit(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->stopping) return false;
  if (!worker_.joinable()) worker_ = std::thread([state = state_] { work(state); });
  state_->queue.push_back(std::move(task));
  state_->changed.notify_all();
  return true;
}

void Runner::run(const std::function<void()>& task, const std::function<void()>& look) {
  // A callback of an asynchronous task, still on the worker: waiting for that task to end would be waiting for oneself.
  if (own_state_ == state_.get()) {
    catch_up([] { return false; });
    return task();
  }
  std::unique_lock<std::mutex> lock(state_->mutex);
  const auto is_free = [&] { return !state_->busy && state_->queue.empty(); };
  wait_looking(state_->changed, lock, kForever, is_free, look);
  state_->busy = true;
  lock.unlock();
  task();
  lock.lock();
  state_->busy = false;
  state_->changed.notify_all();
}

bool Runner::is_idle_within(std::chrono::milliseconds patience) const {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->changed.wait_for(lock, patience, [&] { return !state_->busy && state_->queue.empty(); });
}

void Runner::stop() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  if (!worker_.joinable()) return;
  if (worker_.get_id() == std::this_thread::get_id()) {
    worker_.detach();
  } else {
    worker_.join();
  }
}

void Runner::leave_as_it_is() {
  // Not detached either: its handle may by now be that of a thread which this process has started.
  ForkGuard::leave_as_it_is(std::make_shared<std::thread>(std::move(worker_)));
  ForkGuard::leave_as_it_is(std::exchange(state_, std::make_shared<State>()));
}

void Runner::catch_up(const std::function<bool()>& is_done) {
  if (own_state_ == nullptr) return;
  while (!is_done()) {
    std::unique_lock<std::mutex> lock(own_state_->mutex);
    if (!run_next(*own_state_, lock)) return;
  }
}

// False when nothing is queued. The task runs without the lock.
bool Runner::run_next(State& state, std::unique_lock<std::mutex>& lock) {
  if (state.queue.empty()) return false;
  std::function<void()> task = std::move(state.queue.front());
  state.queue.pop_front();
  lock.unlock();
  task();
  task = nullptr;  // what it holds may need Python's lock to be dropped: not under the mutex
  lock.lock();
  return true;
}

void Runner::work(const std::shared_ptr<State>& state) {
  own_state_ = state.get();
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return !state->busy && (state->stopping || !state->queue.empty()); });
    if (state->queue.empty()) return;
    state->busy = true;
    run_next(*state, lock);
    state->busy = false;
    state->changed.notify_all();
  }
}

}  // namespace torchtp::backend
