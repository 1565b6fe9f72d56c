#include "backend/point_to_point.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "backend/dense.h"
#include "core/error.h"

namespace torchtp::backend {
namespace {

constexpr std::chrono::microseconds kShortestPause{50};
constexpr std::chrono::microseconds kLongestPause{2000};

}  // namespace

// One send or receive under way. Whoever claims it (a waiter, or the thread that looks after messages) finishes it.
class Message : public MessageWork {
 public:
  using Post = std::function<shm::Mailbox::Ticket(shm::Mailbox&, void*, size_t)>;

  Message(std::shared_ptr<shm::Mailbox> mailbox, std::shared_ptr<std::atomic<bool>> waiting, int rank, c10d::OpType op,
          const char* title, const at::Tensor& tensor, const Post& post)
      : MessageWork(rank, op, title, 0, {tensor}, {tensor}),
        mailbox_(std::move(mailbox)),
        waiting_(std::move(waiting)),
        receives_(op != c10d::OpType::SEND),
        dense_(tensor, !receives_),
        ticket_(posted(post)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (!Work::isCompleted()) begin_wait();
    if (timeout == kNoTimeout && !waiting_->exchange(true)) {
      if (claim()) finish_claimed();
      *waiting_ = false;
    }
    return Work::wait(timeout);
  }

  bool isCompleted() override {
    advance();
    return Work::isCompleted();
  }

  int sourceRank() const override { return peer_; }

  // Finishes the message if that takes no waiting. True once it is finished, or somebody is waiting for it.
  bool advance() {
    {
      // The mailbox forgets a ticket that was waited for, so nobody may ask for it once it is claimed.
      std::lock_guard<std::mutex> lock(claim_mutex_);
      if (claimed_) return true;
      try {
        if (!mailbox_->is_done(ticket_)) return false;
      } catch (...) {
        // finish_claimed meets the same error
      }
      claimed_ = true;
    }
    finish_claimed();
    return true;
  }

  void fail(std::exception_ptr error) {
    if (claim()) end(std::move(error), {});
  }

 private:
  // A receive whose message has come already, and has another size, fails at once.
  shm::Mailbox::Ticket posted(const Post& post) {
    try {
      return post(*mailbox_, dense_.data(), dense_.num_bytes());
    } catch (...) {
      std::rethrow_exception(as_dist_error(std::current_exception()));
    }
  }

  bool claim() {
    std::lock_guard<std::mutex> lock(claim_mutex_);
    return !std::exchange(claimed_, true);
  }

  void finish_claimed() {
    std::exception_ptr error;
    shm::Mailbox::Passage passage;
    try {
      peer_ = mailbox_->wait(ticket_, &passage);
      const at::NoGradGuard no_grad;
      if (receives_) dense_.store();
    } catch (...) {
      error = std::current_exception();
    }
    end(std::move(error), passage);
  }

  void end(std::exception_ptr error, const shm::Mailbox::Passage& passage) {
    complete({as_dist_error(std::move(error)), peer_, static_cast<int64_t>(passage.number), passage.came_ns});
  }

  const std::shared_ptr<shm::Mailbox> mailbox_;
  const std::shared_ptr<std::atomic<bool>> waiting_;
  const bool receives_;
  Dense dense_;
  const shm::Mailbox::Ticket ticket_;
  std::mutex claim_mutex_;
  bool claimed_ = false;
  int peer_ = -1;
};

PointToPoint::PointToPoint(std::shared_ptr<shm::Group> group)
    : group_(std::move(group)),
      mailbox_(std::make_shared<shm::Mailbox>(group_)),
      waiting_(std::make_shared<std::atomic<bool>>(false)),
      state_(std::make_shared<State>()) {}

PointToPoint::~PointToPoint() { stop(); }

c10::intrusive_ptr<MessageWork> PointToPoint::send(const at::Tensor& tensor, int peer, int tag) {
  check_peer(peer, "send");
  check_tensor(tensor, "send");
  return add(c10::make_intrusive<Message>(mailbox_, waiting_, group_->rank(), c10d::OpType::SEND, "torchtp:send",
                                          tensor, [=](shm::Mailbox& mailbox, void* data, size_t num_bytes) {
                                            return mailbox.post_send(peer, tag, data, num_bytes);
                                          }));
}

c10::intrusive_ptr<MessageWork> PointToPoint::recv(const at::Tensor& tensor, int peer, int tag) {
  check_peer(peer, "recv");
  check_tensor(tensor, "recv");
  return add(c10::make_intrusive<Message>(mailbox_, waiting_, group_->rank(), c10d::OpType::RECV, "torchtp:recv",
                                          tensor, [=](shm::Mailbox& mailbox, void* data, size_t num_bytes) {
                                            return mailbox.post_recv(peer, tag, data, num_bytes);
                                          }));
}

c10::intrusive_ptr<MessageWork> PointToPoint::recv_any(const at::Tensor& tensor, int tag) {
  check_tensor(tensor, "recv");
  return add(c10::make_intrusive<Message>(mailbox_, waiting_, group_->rank(), c10d::OpType::RECVANYSOURCE,
                                          "torchtp:recvAnySource", tensor,
                                          [=](shm::Mailbox& mailbox, void* data, size_t num_bytes) {
                                            return mailbox.post_recv_any(tag, data, num_bytes);
                                          }));
}

void PointToPoint::check_peer(int peer, const char* what) const {
  TORCH_CHECK(peer >= 0 && peer < group_->size() && peer != group_->rank(), "torchtp ", what,
              ": the peer must be another rank of the group (0 to ", group_->size() - 1, "), got ", peer, " on rank ",
              group_->rank());
}

c10::intrusive_ptr<MessageWork> PointToPoint::add(c10::intrusive_ptr<Message> message) {
  if (message->advance()) return message;
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->unfinished.push_back(message);
  if (!thread_.joinable() && !state_->stopping) {
    thread_ = std::thread([state = state_] { look_after(state); });
  }
  state_->changed.notify_all();
  return message;
}

void PointToPoint::look_after(const std::shared_ptr<State>& state) {
  std::chrono::microseconds pause = kShortestPause;
  std::unique_lock<std::mutex> lock(state->mutex);
  while (!state->stopping) {
    if (state->unfinished.empty()) {
      state->changed.wait(lock, [&] { return state->stopping || !state->unfinished.empty(); });
      pause = kShortestPause;
      continue;
    }
    // Sleeping first: most messages are waited for at once, and finished by who waits.
    const size_t before = state->unfinished.size();
    if (state->changed.wait_for(lock, pause, [&] { return state->stopping; })) return;
    auto messages = std::exchange(state->unfinished, {});
    lock.unlock();
    messages.remove_if([](const c10::intrusive_ptr<Message>& message) { return message->advance(); });
    lock.lock();
    state->unfinished.splice(state->unfinished.begin(), messages);
    pause = state->unfinished.size() < before ? kShortestPause : std::min(2 * pause, kLongestPause);
  }
}

void PointToPoint::stop() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  if (thread_.joinable()) {
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }
  std::list<c10::intrusive_ptr<Message>> left;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    left = std::exchange(state_->unfinished, {});
  }
  for (auto& message : left) {
    message->fail(std::make_exception_ptr(Error("the process group was shut down before the message arrived")));
  }
}

}  // namespace torchtp::backend
