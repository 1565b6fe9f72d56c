#pragma once

#include <atomic>
#include <memory>

#include "backend/message_watch.h"
#include "shm/group.h"
#include "shm/mailbox.h"

namespace torchtp::backend {

// send, recv and recvAnysource inside a host. Who waits for a message moves it himself, without a thread between.
class PointToPoint {
 public:
  explicit PointToPoint(std::shared_ptr<shm::Group> group);
  ~PointToPoint() { stop(); }
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  c10::intrusive_ptr<MessageWork> send(const at::Tensor& tensor, int peer, int tag);
  c10::intrusive_ptr<MessageWork> recv(const at::Tensor& tensor, int peer, int tag);
  c10::intrusive_ptr<MessageWork> recv_any(const at::Tensor& tensor, int tag);
  // Unfinished messages fail. Must not be called with Python's lock held.
  void stop();

 private:
  void check_peer(int peer, const char* what) const;

  std::shared_ptr<shm::Group> group_;
  std::shared_ptr<shm::Mailbox> mailbox_;
  std::shared_ptr<std::atomic<bool>> waiting_;  // one thread may wait in the mailbox at a time
  MessageWatch watch_;
};

}  // namespace torchtp::backend
