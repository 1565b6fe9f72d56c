#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "core/deadline.h"
#include "shm/group.h"

namespace torchtp::backend {

// Lets the program's Python signal handlers run, which Python itself does only between its own instructions: for
// whoever waits long on the main thread. Throws what a handler raises (Ctrl-C: KeyboardInterrupt), with its words in
// what(). Does nothing on any other thread. Takes Python's lock.
void run_signal_handlers();

// Whether such a handler has called on this thread, which waits meanwhile.
bool in_signal_handler();

// Throws DistBackendError in such a handler: the wait holds the group. `call`: "a collective".
void refuse_in_signal_handler(const char* call);

constexpr std::chrono::milliseconds kForever = std::chrono::milliseconds::max();

// Waits until `is_done()`, for no longer than the timeout; returns whether it is. Meanwhile `look` is called without
// the lock, as often as handlers run, and what it throws ends the wait.
template <typename IsDone, typename Look>
bool wait_looking(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                  std::chrono::milliseconds timeout, const IsDone& is_done, const Look& look) {
  if (is_done()) return true;
  const Deadline deadline(timeout);
  while (!changed.wait_for(lock, std::min<std::chrono::nanoseconds>(shm::kBetweenSignals, deadline.left()), is_done)) {
    if (deadline.passed()) return false;
    lock.unlock();
    look();
    lock.lock();
  }
  return true;
}

}  // namespace torchtp::backend
