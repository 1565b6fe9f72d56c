#include "backend/runner.h"

#include <utility>

namespace torchtp::backend {

Runner::Runner() : state_(std::make_shared<State>()) {}

Runner::~Runner() { stop(); }

void Runner::submit(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->queue.push_back(std::move(task));
  if (!worker_.joinable() && !state_->stopping) {
    worker_ = std::thread([state = state_] { work(state); });
  }
  state_->changed.notify_all();
}

void Runner::run(const std::function<void()>& task) {
  // A callback of an asynchronous task, still on the worker: waiting for that task to end would be waiting for oneself.
  if (worker_.get_id() == std::this_thread::get_id()) return task();
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->changed.wait(lock, [&] { return !state_->busy && state_->queue.empty(); });
  state_->busy = true;
  lock.unlock();
  task();
  lock.lock();
  state_->busy = false;
  state_->changed.notify_all();
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

void Runner::work(const std::shared_ptr<State>& state) {
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return !state->busy && (state->stopping || !state->queue.empty()); });
    if (state->queue.empty()) return;
    std::function<void()> task = std::move(state->queue.front());
    state->queue.pop_front();
    state->busy = true;
    lock.unlock();
    task();
    task = nullptr;  // what it holds may need Python's lock to be dropped: not under the mutex
    lock.lock();
    state->busy = false;
    state->changed.notify_all();
  }
}

}  // namespace torchtp::backend
