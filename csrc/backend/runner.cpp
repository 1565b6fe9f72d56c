#include "backend/runner.h"

#include <iterator>
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
  state_->queue.add(state_->place(), std::move(task));
  if (!state_->busy) state_->for_worker.notify_one();
  return true;
}

void Runner::run(const std::function<void()>& task, const std::function<void()>& look) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  // A callback of an asynchronous task, still on the worker: waiting for that task to end would be waiting for oneself.
  if (state_->is_own()) {
    while (run_next(*state_, lock, state_->place_of_callbacks.value_or(kLastPlace))) {
    }
    lock.unlock();
    return task();
  }
  const auto is_free = [&] { return !state_->busy && state_->queue.is_empty(); };
  wait_looking(state_->for_callers, lock, kForever, is_free, look);
  state_->busy = true;
  lock.unlock();
  task();
  lock.lock();
  state_->end_task();
}

bool Runner::is_idle_within(std::chrono::milliseconds patience) const {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->for_callers.wait_for(lock, patience, [&] { return !state_->busy && state_->queue.is_empty(); });
}

void Runner::stop() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
    state_->for_worker.notify_one();
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

// False when nothing is queued up to the `last` place. The task runs without the lock.
bool Runner::run_next(State& state, std::unique_lock<std::mutex>& lock, Place last) {
  if (state.queue.is_empty() || state.queue.first() > last) return false;
  std::function<void()> task = state.queue.take();
  lock.unlock();
  task();
  task = nullptr;  // what it holds may need Python's lock to be dropped: not under the mutex
  lock.lock();
  return true;
}

void Runner::Queue::add(Place place, std::function<void()> task) {
  auto behind = tasks_.end();
  while (behind != tasks_.begin() && std::prev(behind)->first > place) --behind;
  tasks_.insert(behind, {place, std::move(task)});
}

std::function<void()> Runner::Queue::take() {
  std::function<void()> task = std::move(tasks_.front().second);
  tasks_.pop_front();
  return task;
}

Runner::Place Runner::State::place() {
  if (is_own() && place_of_callbacks) return *place_of_callbacks;
  return next_place++;
}

void Runner::State::end_task() {
  busy = false;
  if (stopping || !queue.is_empty()) for_worker.notify_one();
  for_callers.notify_all();
}

Runner::Place Runner::Places::hold() const {
  if (!state_) return 0;
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->place();
}

// Callbacks throw nothing: their errors stay in their futures.
void Runner::Places::run_at(Place place, std::function<void()> callbacks) const {
  if (!state_ || !state_->is_own()) return callbacks();
  std::optional<Place>& now = state_->place_of_callbacks;
  Queue& later = state_->later_callbacks;
  if (now && place > *now) return later.add(place, std::move(callbacks));
  const auto before = std::exchange(now, place);
  callbacks();
  while (!before && !later.is_empty()) {
    now = later.first();
    later.take()();
  }
  now = before;
}

void Runner::Places::catch_up(const std::function<bool()>& is_done) const {
  if (!state_ || !state_->is_own()) return;
  while (!is_done()) {
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (!run_next(*state_, lock)) return;
  }
}

void Runner::work(const std::shared_ptr<State>& state) {
  own_state_ = state.get();
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    state->for_worker.wait(lock, [&] { return !state->busy && (state->stopping || !state->queue.is_empty()); });
    if (state->queue.is_empty()) return;
    state->busy = true;
    run_next(*state, lock);
    state->end_task();
  }
}

}  // namespace torchtp::backend
