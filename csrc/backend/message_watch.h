#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/message_work.h"

namespace torchtp::backend {

// A thread that looks after the messages of a group for which nobody waits yet (an isend before a barrier, a future),
// now and then; started by the first of them. Thread-safe.
class MessageWatch {
 public:
  MessageWatch() : state_(std::make_shared<State>()) {}
  ~MessageWatch() { stop(); }
  MessageWatch(const MessageWatch&) = delete;
  MessageWatch& operator=(const MessageWatch&) = delete;

  // Gives back what it is given.
  c10::intrusive_ptr<MessageWork> add(c10::intrusive_ptr<MessageWork> message);
  // Unfinished messages fail. Must not be called with Python's lock held.
  void stop();

 private:
  // Shared with the thread: a callback of a message may drop the last reference to the group on it, and it then
  // outlives this object.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::list<c10::intrusive_ptr<MessageWork>> unfinished;
    bool stopping = false;
  };

  static void look_after(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace torchtp::backend
