#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>

#include "backend/work.h"

namespace torchtp::backend {

// How a message went. Times are of core/clock.h.
struct MessageEnd {
  std::exception_ptr error;
  int peer = -1;
  int64_t number = -1;         // from its sender to its receiver; -1: not known
  int64_t came_ns = 0;         // when the partner came to it, as that one says; 0: nobody was waited for
  int64_t waited_from_ns = 0;  // when a thread of the program began to wait for it; 0: none has
};

// A message under way, of which somebody may want to hear how it went. Whoever claims it (a waiter, or MessageWatch)
// finishes it.
class MessageWork : public TorchtpWork {
 public:
  using Observer = std::function<void(const MessageEnd&)>;
  using TorchtpWork::TorchtpWork;

  // Called once, before those who wait for the message go on; now if it has ended.
  void observe(Observer observer);

  // Finishes the message if that takes no waiting. True once it is finished, or somebody is waiting for it.
  bool advance();
  void fail(std::exception_ptr error);  // unless somebody is waiting for it

  bool isCompleted() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  // Whether finish_claimed() would take no waiting; asked while the message is not claimed, by one thread at a time.
  // Must not throw.
  virtual bool is_there() = 0;
  // Waits and completes; called once.
  virtual void finish_claimed() = 0;

  bool claim();
  // `own_limit`: not for longer than the caller says, who goes on then.
  void begin_wait(bool own_limit);
  // Whether somebody has asked for its end: by a wait, in vain so far, a future, or is_completed().
  bool is_wanted() const { return wanted_.load(); }
  // How long a future or a thread without a limit of its own has wanted it, from look to look of is_there(): not while
  // the whole job is stopped, for nobody could come meanwhile.
  std::chrono::nanoseconds wanted_for();
  void complete(MessageEnd end);

 private:
  std::mutex claim_mutex_;
  bool claimed_ = false;
  std::atomic<int64_t> waited_from_ns_{0};
  std::atomic<bool> wanted_{false}, limited_by_group_{false};
  int64_t looked_ns_ = 0;
  std::chrono::nanoseconds wanted_for_{0};
  std::mutex end_mutex_;  // of the members below
  bool ended_ = false;
  MessageEnd end_;
  Observer observer_;
};

}  // namespace torchtp::backend
