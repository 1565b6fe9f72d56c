#include "backend/point_to_point.h"

#include <ATen/core/grad_mode.h>

#include <chrono>
#include <functional>
#include <utility>

#include "backend/dense.h"
#include "collectives/call.h"

namespace torchtp::backend {

// One send or receive under way.
class Message : public MessageWork {
 public:
  static constexpr std::chrono::milliseconds kPause{20};  // between looks, which cost a system call a rank
  using Post = std::function<shm::Mailbox::Ticket(shm::Mailbox&, void*, Contents)>;

  Message(std::shared_ptr<shm::Mailbox> mailbox, std::shared_ptr<std::atomic<bool>> waiting, int rank, c10d::OpType op,
          const char* title, const at::Tensor& tensor, const Post& post)
      : MessageWork(rank, op, title, 0, {tensor}, {tensor}),
        mailbox_(std::move(mailbox)),
        waiting_(std::move(waiting)),
        receives_(op != c10d::OpType::SEND),
        dense_(tensor, !receives_),
        ticket_(posted(post)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (!Work::isCompleted()) begin_wait(timeout != kNoTimeout);
    if (timeout == kNoTimeout && !waiting_->exchange(true)) {
      if (claim()) finish_claimed();
      *waiting_ = false;
    }
    return wait_for_others(timeout);
  }

  int sourceRank() const override { return peer_; }

 private:
  // A receive whose message has come already, and has other contents, fails at once.
  shm::Mailbox::Ticket posted(const Post& post) {
    try {
      return post(*mailbox_, dense_.data(), dense_.contents());
    } catch (...) {
      std::rethrow_exception(as_dist_error(std::current_exception()));
    }
  }

  // The mailbox forgets a ticket that was waited for, so nobody may ask for it once the message is claimed.
  bool is_there() override {
    try {
      if (mailbox_->is_done(ticket_)) return true;
      const auto waited = wanted_for();
      const auto now = std::chrono::steady_clock::now();
      if (now < next_look_) return false;
      next_look_ = now + kPause;
      mailbox_->look_after(ticket_, is_wanted(), waited);
      return false;
    } catch (...) {
      return true;  // finish_claimed meets the same error
    }
  }

  void finish_claimed() override {
    std::exception_ptr error;
    shm::Mailbox::Passage passage;
    try {
      peer_ = mailbox_->wait(ticket_, &passage);
      const at::NoGradGuard no_grad;
      if (receives_) dense_.store();
    } catch (...) {
      error = std::current_exception();
    }
    complete({as_dist_error(std::move(error)), peer_, static_cast<int64_t>(passage.number), passage.came_ns});
  }

  const std::shared_ptr<shm::Mailbox> mailbox_;
  const std::shared_ptr<std::atomic<bool>> waiting_;
  const bool receives_;
  Dense dense_;
  const shm::Mailbox::Ticket ticket_;
  std::chrono::steady_clock::time_point next_look_ = std::chrono::steady_clock::now() + kPause;
  int peer_ = -1;
};

PointToPoint::PointToPoint(std::shared_ptr<shm::Group> group)
    : group_(std::move(group)),
      mailbox_(std::make_shared<shm::Mailbox>(group_, collectives::describe_contents)),
      waiting_(std::make_shared<std::atomic<bool>>(false)) {}

c10::intrusive_ptr<MessageWork> PointToPoint::send(const at::Tensor& tensor, int peer, int tag) {
  check_peer(peer, "send");
  check_tensor(tensor, "send");
  return watch_.add(c10::make_intrusive<Message>(mailbox_, waiting_, group_->rank(), c10d::OpType::SEND, "torchtp:send",
                                                 tensor, [=](shm::Mailbox& mailbox, void* data, Contents contents) {
                                                   return mailbox.post_send(peer, tag, data, contents);
                                                 }));
}

c10::intrusive_ptr<MessageWork> PointToPoint::recv(const at::Tensor& tensor, int peer, int tag) {
  check_peer(peer, "recv");
  check_tensor(tensor, "recv");
  check_writable(tensor, "recv");
  return watch_.add(c10::make_intrusive<Message>(mailbox_, waiting_, group_->rank(), c10d::OpType::RECV, "torchtp:recv",
                                                 tensor, [=](shm::Mailbox& mailbox, void* data, Contents contents) {
                                                   return mailbox.post_recv(peer, tag, data, contents);
                                                 }));
}

c10::intrusive_ptr<MessageWork> PointToPoint::recv_any(const at::Tensor& tensor, int tag) {
  check_tensor(tensor, "recv");
  check_writable(tensor, "recv");
  return watch_.add(c10::make_intrusive<Message>(mailbox_, waiting_, group_->rank(), c10d::OpType::RECVANYSOURCE,
                                                 "torchtp:recvAnySource", tensor,
                                                 [=](shm::Mailbox& mailbox, void* data, Contents contents) {
                                                   return mailbox.post_recv_any(tag, data, contents);
                                                 }));
}

void PointToPoint::stop() {
  mailbox_->close();  // before anybody hears of it and frees what would be written to
  watch_.stop();
}

void PointToPoint::check_peer(int peer, const char* what) const {
  TORCH_CHECK(peer >= 0 && peer < group_->size() && peer != group_->rank(), "torchtp ", what,
              ": the peer must be another rank of the group (0 to ", group_->size() - 1, "), got ", peer, " on rank ",
              group_->rank());
}

}  // namespace torchtp::backend
