#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace torchtp::backend {

// Runs tasks one at a time, in the order given: asynchronous ones on one worker thread (started by the first), a
// synchronous one on its caller's thread once everything before it is done. Tasks do not throw.
class Runner {
 public:
  Runner();
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  bool submit(std::function<void()> task);  // false after stop(): it will not run
  // `look` is called some ten times a second while others are to be done first; where it throws, the task will not run.
  void run(const std::function<void()>& task, const std::function<void()>& look);
  // Whether nothing runs and nothing is queued, at the end of so long a wait at the latest. Without Python's lock.
  bool is_idle_within(std::chrono::milliseconds patience) const;
  static bool on_worker() { return own_state_ != nullptr; }
  // On a worker: runs what is queued, in order, until `is_done()` or nothing is left. A callback of one task may wait
  // for a later one, which nobody else would run. On any other thread it does nothing.
  static void catch_up(const std::function<bool()>& is_done);
  // Runs what was submitted, then ends the worker. Must not be called with Python's lock held.
  void stop();
  // Instead, in a forked child, where the worker is not.
  void leave_as_it_is();

 private:
  // Shared with the worker: the last reference to a group may be dropped by a callback on the worker itself, which then
  // outlives this object.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    bool busy = false;  // a task is running, on whichever thread
    bool stopping = false;
  };

  static void work(const std::shared_ptr<State>& state);
  static bool run_next(State& state, std::unique_lock<std::mutex>& lock);

  static thread_local State* own_state_;  // of the runner whose worker this thread is

  std::shared_ptr<State> state_;
  std::thread worker_;
};

}  // namespace torchtp::backend
