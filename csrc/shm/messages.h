#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "core/contents.h"
#include "core/staging.h"
#include "core/tickets.h"
#include "shm/mailbox.h"
#include "shm/ring.h"

namespace torchtp::shm {

constexpr int kAnyPeer = -1;

// What a rank has posted in its mailbox, and how it moves through the rings between the rank and its peers. Never
// waits. Not thread-safe.
class Messages {
 public:
  using Ticket = Mailbox::Ticket;
  using Passage = Mailbox::Passage;

  struct Operation {
    int peer;  // kAnyPeer until it is known
    int32_t tag;
    Contents contents;
    bool is_send;
    bool done;
    Passage passage;
  };

  Messages(Group& group, DescribeContents describe);

  // Move what can be moved at once.
  Ticket send(int peer, int32_t tag, const std::byte* data, Contents contents);
  Ticket receive(int peer, int32_t tag, std::byte* data, Contents contents);
  void progress();

  Operation* find(Ticket ticket) { return operations_.find(ticket); }
  Operation& at(Ticket ticket) { return operations_.at(ticket); }
  void forget(Ticket ticket) { operations_.remove(ticket); }
  // How often something has moved between this rank and the peer.
  uint64_t moves(int peer) const { return peers_[peer].moves; }
  // "recv of 16 bytes with tag 5 from rank 0".
  std::string describe(Ticket ticket);

  void check() const;  // throws the group's error, or that it is closed
  void close() { closed_ = true; }
  bool is_closed() const { return closed_; }
  // An operation has failed: its memory, and that of all others, may be gone at any time.
  void set_broken() { broken_ = true; }

 private:
  struct Header;

  struct Outgoing {
    Ticket ticket;
    int32_t tag;
    const std::byte* data;
    Contents contents;
    size_t done;
    bool begun;
    Staging::Ways ways;
    Passage passage;
    bool is_stuck;  // has found no room
  };

  struct Posted {  // a receive nobody has answered yet
    Ticket ticket;
    int peer;
    int32_t tag;
    std::byte* data;
    Contents contents;
  };

  struct SetAside {
    int32_t tag;
    uint8_t dtype;
    Passage passage;
    std::vector<std::byte> bytes;
  };

  // The message that is coming in from a peer: into a receive's buffer, or set aside.
  struct Incoming {
    bool active = false;
    bool wanted = false;
    Ticket ticket = 0;
    Passage passage;
    Staging::Ways ways;
    int32_t tag = 0;
    std::byte* data = nullptr;
    Contents contents;
    size_t done = 0;
    std::vector<std::byte> aside;
  };

  struct Peer {
    RingWriter writer;
    RingReader reader;
    std::deque<Outgoing> outgoing;
    Incoming incoming;
    std::deque<SetAside> aside;
    uint64_t sent = 0;
    uint64_t received = 0;
    uint64_t moves = 1;  // not 0: to who has not asked before it is news
  };

  static bool fits(const Posted& receive, int peer, int32_t tag);
  static bool has_room(Outgoing& message, size_t room, size_t least);

  void push(int to);
  void begin(Peer& peer, Outgoing& message, std::byte* place);
  void pull(int from);
  void take_header(int from, const Header& header);
  void serve_aside(int from);
  bool is_wanted(int from) const;
  void check_contents(const Posted& receive, int from, const Contents& sent) const;
  void finish(Ticket ticket, int peer, const Passage& passage);

  Group& group_;
  const DescribeContents describe_;
  Staging staging_;
  std::vector<Peer> peers_;
  std::vector<Posted> posted_;  // in the order posted
  Tickets<Operation> operations_;
  bool closed_ = false;
  bool broken_ = false;
};

}  // namespace torchtp::shm
