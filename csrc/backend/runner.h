#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace torchtp::backend {

// Runs tasks one at a time, in the order of their places: asynchronous ones on one worker thread (started by the
// first), a synchronous one on its caller's thread once everything before it is done. Tasks do not throw.
//
// A place is behind all that was given before, but for what a future's callbacks give while they run on the worker:
// that takes the place which the future held when it was asked for. When a callback runs is up to each rank, where its
// program asked for the future is not; so the order is the same on all ranks. Callbacks of a later place do not begin
// while others run, which may have more to give.
class Runner {
  struct State;

 public:
  using Place = uint64_t;

  // The places of one runner, for who may outlive it.
  class Places {
   public:
    Places() = default;  // of no runner: holds nothing, and runs callbacks as they come
    explicit Places(std::shared_ptr<State> state) : state_(std::move(state)) {}

    Place hold() const;
    void run_at(Place place, std::function<void()> callbacks) const;
    // On the worker: runs what is queued, in order, until `is_done()` or nothing is left. A callback of one task may
    // wait for a later one, which nobody else would run. On any other thread it does nothing.
    void catch_up(const std::function<bool()>& is_done) const;

   private:
    std::shared_ptr<State> state_;
  };

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
  Places places() const { return Places(state_); }
  // Runs what was submitted, then ends the worker. Must not be called with Python's lock held.
  void stop();
  // Instead, in a forked child, where the worker is not.
  void leave_as_it_is();

 private:
  static constexpr Place kLastPlace = std::numeric_limits<Place>::max();

  // By place; of one place in the order given.
  class Queue {
   public:
    bool is_empty() const { return tasks_.empty(); }
    Place first() const { return tasks_.front().first; }
    void add(Place place, std::function<void()> task);
    std::function<void()> take();

   private:
    std::deque<std::pair<Place, std::function<void()>>> tasks_;
  };

  // Shared with the worker: the last reference to a group may be dropped by a callback on the worker itself, which then
  // outlives this object.
  struct State {
    std::mutex mutex;
    // Apart from each other: the worker, woken by every synchronous call's end, would take a core from a rank.
    std::condition_variable for_worker;
    std::condition_variable for_callers;
    Queue queue;
    Place next_place = 0;
    bool busy = false;  // a task is running, on whichever thread
    bool stopping = false;
    // The worker's own:
    std::optional<Place> place_of_callbacks;  // that run now
    Queue later_callbacks;

    bool is_own() const { return own_state_ == this; }
    // Under the mutex:
    Place place();
    void end_task();
  };

  static void work(const std::shared_ptr<State>& state);
  static bool run_next(State& state, std::unique_lock<std::mutex>& lock, Place last = kLastPlace);

  static thread_local State* own_state_;  // of the runner whose worker this thread is

  std::shared_ptr<State> state_;
  std::thread worker_;
};

}  // namespace torchtp::backend
