#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "core/contents.h"
#include "shm/group.h"

namespace torchtp::shm {

class Messages;

// Point-to-point messages with tags between the ranks of a group, on rings of their own. One mailbox a group.
//
// Operations are posted, then waited for. Posting moves what can be moved at once; every wait moves all posted
// operations, so no order of sizes, sends and receives deadlocks as long as some thread of each rank waits for its own.
// Messages of one (peer, tag) arrive in the order sent; a message nobody asked for yet is set aside when a later one is
// wanted. Send and receive must have the same contents: otherwise Error on both ranks. No messages to oneself.
// Thread-safe.
class Mailbox {
 public:
  using Ticket = uint64_t;

  // Of a message that is done.
  struct Passage {
    uint64_t number = 0;  // from that rank to the other, counted from 1
    // When the partner came to it: of a receive, when the sender began; of a send that found no room, when the receiver
    // made some, else 0. The sender's word, unchecked.
    int64_t came_ns = 0;
  };

  explicit Mailbox(std::shared_ptr<Group> group, DescribeContents describe = in_bytes);
  ~Mailbox();

  // The memory must stay valid until the operation is done (a send is done when its bytes have left the buffer), or one
  // of any has failed, or close().
  Ticket post_send(int peer, int32_t tag, const void* data, Contents contents);
  Ticket post_recv(int peer, int32_t tag, void* data, Contents contents);
  Ticket post_recv_any(int32_t tag, void* data, Contents contents);

  // Returns the peer; each ticket is waited for once; throws what the group throws.
  int wait(Ticket ticket, Passage* passage = nullptr);
  bool is_done(Ticket ticket);  // makes progress too; the ticket still has to be waited for
  // One look at an operation for which no thread waits here: throws, as the group does, where a rank has died, and, if
  // it is `wanted` elsewhere, where its peer has left or what was waited exceeds the group's timeout.
  void look_after(Ticket ticket, bool wanted, std::chrono::nanoseconds waited);

  // Nothing is moved from now on: what is not done is an Error to who waits for it, on this rank.
  void close();

  void send(int peer, int32_t tag, const void* data, Contents contents) { wait(post_send(peer, tag, data, contents)); }
  void recv(int peer, int32_t tag, void* data, Contents contents) { wait(post_recv(peer, tag, data, contents)); }
  int recv_any(int32_t tag, void* data, Contents contents) { return wait(post_recv_any(tag, data, contents)); }

 private:
  class Done;

  template <typename Step>
  auto guarded(const Step& step);
  Ticket post_receive(int peer, int32_t tag, void* data, Contents contents);
  void check_peer(int peer) const;

  std::shared_ptr<Group> group_;
  std::mutex mutex_;
  std::unique_ptr<Messages> messages_;
};

}  // namespace torchtp::shm
