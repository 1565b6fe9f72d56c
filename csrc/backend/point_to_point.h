#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "backend/message_work.h"
#include "shm/group.h"
#include "shm/mailbox.h"

namespace torchtp::backend {

class Message;

// send, recv and recvAnysource. Who waits for a message moves it himself, without a thread between; what nobody waits
// for yet (an isend before a barrier, a future) is moved by a thread that looks after it now and then.
class PointToPoint {
 public:
  explicit PointToPoint(std::shared_ptr<shm::Group> group);
  ~PointToPoint();
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  c10::intrusive_ptr<MessageWork> send(const at::Tensor& tensor, int peer, int tag);
  c10::intrusive_ptr<MessageWork> recv(const at::Tensor& tensor, int peer, int tag);
  c10::intrusive_ptr<MessageWork> recv_any(const at::Tensor& tensor, int tag);
  // Unfinished messages fail. Must not be called with Python's lock held.
  void stop();

 private:
  // Shared with the thread: a callback of a message may drop the last reference to the group on it, and it then
  // outlives this object.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::list<c10::intrusive_ptr<Message>> unfinished;
    bool stopping = false;
  };

  static void look_after(const std::shared_ptr<State>& state);

  c10::intrusive_ptr<MessageWork> add(c10::intrusive_ptr<Message> message);
  void check_peer(int peer, const char* what) const;

  std::shared_ptr<shm::Group> group_;
  std::shared_ptr<shm::Mailbox> mailbox_;
  std::shared_ptr<std::atomic<bool>> waiting_;  // one thread may wait in the mailbox at a time
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace torchtp::backend
