#include "shm/mailbox.h"

#include <utility>

#include "core/format.h"
#include "shm/messages.h"

namespace torchtp::shm {

Mailbox::Mailbox(std::shared_ptr<Group> group, DescribeContents describe)
    : group_(std::move(group)), messages_(std::make_unique<Messages>(*group_, describe)) {}

Mailbox::~Mailbox() = default;

// Runs `step` under the lock; an error in it is everybody's end, since half a message cannot be taken back.
template <typename Step>
auto Mailbox::guarded(const Step& step) {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    return step();
  } catch (const std::exception& error) {
    messages_->set_broken();
    if (!messages_->is_closed()) group_->abort(error.what());
    group_->check();
    throw;
  }
}

void Mailbox::check_peer(int peer) const {
  if (peer >= 0 && peer < group_->size() && peer != group_->rank()) return;
  throw Error(cat("rank ", group_->rank(), " of ", group_->size(), " cannot exchange messages with rank ", peer,
                  peer == group_->rank() ? " (itself)" : ""));
}

Mailbox::Ticket Mailbox::post_send(int peer, int32_t tag, const void* data, Contents contents) {
  check_peer(peer);
  return guarded([&] {
    messages_->check();
    return messages_->send(peer, tag, static_cast<const std::byte*>(data), contents);
  });
}

Mailbox::Ticket Mailbox::post_receive(int peer, int32_t tag, void* data, Contents contents) {
  return guarded([&] {
    messages_->check();
    return messages_->receive(peer, tag, static_cast<std::byte*>(data), contents);
  });
}

Mailbox::Ticket Mailbox::post_recv(int peer, int32_t tag, void* data, Contents contents) {
  check_peer(peer);
  return post_receive(peer, tag, data, contents);
}

Mailbox::Ticket Mailbox::post_recv_any(int32_t tag, void* data, Contents contents) {
  return post_receive(kAnyPeer, tag, data, contents);
}

class Mailbox::Done final : public Awaited {
 public:
  Done(Mailbox& mailbox, Ticket ticket, bool wanted) : mailbox_(mailbox), ticket_(ticket), wanted_(wanted) {}

  bool ready() override { return mailbox_.is_done(ticket_); }

  uint64_t missing() override {
    std::lock_guard<std::mutex> lock(mailbox_.mutex_);
    const int peer = mailbox_.messages_->at(ticket_).peer;
    if (peer != kAnyPeer) return uint64_t{1} << peer;
    const uint64_t all = (uint64_t{2} << (mailbox_.group_->size() - 1)) - 1;
    return all & ~(uint64_t{1} << mailbox_.group_->rank());
  }

  // From any rank: as long as one is there it may still send.
  bool is_hopeless(uint64_t left) override { return wanted_ && (missing() & ~left) == 0; }

  bool needs_all_missing() override {
    std::lock_guard<std::mutex> lock(mailbox_.mutex_);
    const int peer = mailbox_.messages_->at(ticket_).peer;
    if (peer == kAnyPeer) return false;
    const uint64_t before = std::exchange(moves_, mailbox_.messages_->moves(peer));
    return moves_ == before;
  }

  std::string describe() override {
    std::lock_guard<std::mutex> lock(mailbox_.mutex_);
    return mailbox_.messages_->describe(ticket_);
  }

 private:
  Mailbox& mailbox_;
  const Ticket ticket_;
  const bool wanted_;
  uint64_t moves_ = 0;  // between this rank and the peer, when last asked
};

bool Mailbox::is_done(Ticket ticket) {
  return guarded([&] {
    const Messages::Operation* const operation = messages_->find(ticket);
    if (operation == nullptr) throw Error(cat("nothing was posted under ticket ", ticket));
    if (!operation->done) messages_->progress();
    if (!operation->done) messages_->check();
    return operation->done;
  });
}

void Mailbox::look_after(Ticket ticket, bool wanted, std::chrono::nanoseconds waited) {
  Done done(*this, ticket, wanted);
  group_->look_after(done, waited);
}

void Mailbox::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  messages_->close();
}

int Mailbox::wait(Ticket ticket, Passage* passage) {
  Done done(*this, ticket, true);
  try {
    group_->wait(Channel::kMailbox, done);
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    messages_->set_broken();
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const Messages::Operation operation = messages_->at(ticket);
  messages_->forget(ticket);
  if (passage != nullptr) *passage = operation.passage;
  return operation.peer;
}

}  // namespace torchtp::shm
