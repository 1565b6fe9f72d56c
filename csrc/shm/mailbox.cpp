#include "shm/mailbox.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "core/claim_lines.h"
#include "core/clock.h"
#include "core/format.h"
#include "core/staging.h"
#include "core/stream_copy.h"
#include "core/tickets.h"
#include "shm/ring.h"

namespace torchtp::shm {

namespace {

constexpr int kAnyPeer = -1;

// Goes before every message, one unit of the ring.
struct alignas(kRingUnit) Header {
  uint64_t num_bytes;
  uint64_t sequence;
  int64_t began_ns;
  int32_t tag;
  Staging::Ways ways;
  uint8_t dtype;
};

struct Outgoing {
  Mailbox::Ticket ticket;
  int32_t tag;
  const std::byte* data;
  Contents contents;
  size_t done;
  bool begun;
  Staging::Ways ways;
  Mailbox::Passage passage;
  bool is_stuck;  // has found no room
};

struct Posted {  // a receive nobody has answered yet
  Mailbox::Ticket ticket;
  int peer;
  int32_t tag;
  std::byte* data;
  Contents contents;
};

struct SetAside {
  int32_t tag;
  uint8_t dtype;
  Mailbox::Passage passage;
  std::vector<std::byte> bytes;
};

// The message that is coming in from a peer: into a receive's buffer, or set aside.
struct Incoming {
  bool active = false;
  bool wanted = false;
  Mailbox::Ticket ticket = 0;
  Mailbox::Passage passage;
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
};

struct Operation {
  int peer;  // kAnyPeer until it is known
  int32_t tag;
  Contents contents;
  bool is_send;
  bool done;
  Mailbox::Passage passage;
};

}  // namespace

struct Mailbox::State {
  State(Group& g, DescribeContents words) : group(g), describe(words) {
    peers.reserve(g.size());
    for (int peer = 0; peer < g.size(); ++peer) {
      peers.push_back({g.ring_to(peer, Channel::kMailbox), g.ring_from(peer, Channel::kMailbox), {}, {}, {}, 0, 0});
    }
  }

  Ticket add(int peer, int32_t tag, Contents contents, bool is_send) {
    return operations.add({peer, tag, contents, is_send, false, {}});
  }

  void finish(Ticket ticket, int peer, const Passage& passage) {
    Operation& operation = operations.at(ticket);
    operation.peer = peer;
    operation.passage = passage;
    operation.done = true;
  }

  void push(int to) {
    Peer& peer = peers[to];
    while (!peer.outgoing.empty()) {
      Outgoing& message = peer.outgoing.front();
      if (!message.begun) peer.writer.begin_message(sizeof(Header) + message.contents.num_bytes);
      while (!message.begun || message.done < message.contents.num_bytes) {
        const size_t header_bytes = message.begun ? 0 : sizeof(Header);
        const size_t wanted = Staging::piece_of_message(message.contents.num_bytes, message.done);
        size_t room = header_bytes + wanted;
        std::byte* const place = peer.writer.room(room);
        if (!has_room(message, room, std::max<size_t>(header_bytes, 1))) return;
        if (!message.begun) begin(peer, message, place);
        const size_t piece = std::min(room - header_bytes, wanted);
        Staging::Copy(staging, Staging::Side::kWrite, message.ways, message.done, piece)
            .run(place + header_bytes, message.data + message.done);
        message.done += piece;
        peer.writer.publish(room);
        group.notify(to, Channel::kMailbox);
      }
      finish(message.ticket, to, message.passage);
      peer.outgoing.pop_front();
    }
  }

  void begin(Peer& peer, Outgoing& message, std::byte* place) {
    message.passage.number = ++peer.sent;
    message.ways = staging.ways_of_message(message.contents.num_bytes);
    const Header header{message.contents.num_bytes, message.passage.number, now_ns(), message.tag, message.ways,
                        message.contents.dtype};
    std::memcpy(place, &header, sizeof(header));
    message.begun = true;
  }

  static bool has_room(Outgoing& message, size_t room, size_t least) {
    if (room < least) {
      message.is_stuck = true;
      return false;
    }
    if (message.is_stuck && message.passage.came_ns == 0) message.passage.came_ns = now_ns();
    return true;
  }

  static bool fits(const Posted& posted, int peer, int32_t tag) {
    return (posted.peer == peer || posted.peer == kAnyPeer) && posted.tag == tag;
  }

  bool is_wanted(int from) const {
    return std::any_of(posted.begin(), posted.end(),
                       [&](const Posted& p) { return p.peer == from || p.peer == kAnyPeer; });
  }

  void check_contents(const Posted& receive, int from, const Contents& sent) const {
    if (receive.contents == sent) return;
    throw Error(cat("rank ", group.rank(), " receives ", describe(receive.contents), " with tag ", receive.tag,
                    " from rank ", from, ", which sent ", describe(sent)));
  }

  // Decides where a message goes whose header stands at the front of the ring.
  void take_header(int from, const Header& header) {
    Peer& peer = peers[from];
    if (header.sequence != ++peer.received) {
      throw Error(
          cat("message ", peer.received, " from rank ", from, " is damaged: it says it is message ", header.sequence));
    }
    const auto match =
        std::find_if(posted.begin(), posted.end(), [&](const Posted& p) { return fits(p, from, header.tag); });
    if (match != posted.end()) check_contents(*match, from, {header.num_bytes, header.dtype});
    peer.incoming = {};
    Incoming& incoming = peer.incoming;
    incoming.active = true;
    incoming.passage = {header.sequence, header.began_ns};
    incoming.ways = header.ways;
    incoming.tag = header.tag;
    incoming.contents = {header.num_bytes, header.dtype};
    incoming.wanted = match != posted.end();
    if (incoming.wanted) {
      incoming.ticket = match->ticket;
      incoming.data = match->data;
      posted.erase(match);
    }
  }

  void pull(int from) {
    Peer& peer = peers[from];
    Incoming& incoming = peer.incoming;
    for (;;) {
      // Only who looks for something empties a ring, else a message waits in it and its sender with it.
      if (!(incoming.active && incoming.wanted) && !is_wanted(from)) break;
      while (!incoming.active || incoming.done < incoming.contents.num_bytes) {
        size_t news = 0;
        std::byte* place = peer.reader.news(news);
        if (news == 0) break;
        size_t header_bytes = 0;
        if (!incoming.active) {
          Header header;
          std::memcpy(&header, place, sizeof(header));
          claim_lines(place, sizeof(header));
          take_header(from, header);
          header_bytes = sizeof(header);
          place += header_bytes;
        }
        const size_t piece =
            std::min(news - header_bytes, Staging::piece_of_message(incoming.contents.num_bytes, incoming.done));
        if (incoming.wanted) {
          const Staging::Copy timed(staging, Staging::Side::kRead, incoming.ways, incoming.done, piece);
          claiming_copy(incoming.data + incoming.done, place, piece, incoming.contents.num_bytes);
        } else {  // grows with what comes, whatever length the header claims
          incoming.aside.insert(incoming.aside.end(), place, place + piece);
        }
        incoming.done += piece;
        peer.reader.consume(header_bytes + (piece + kRingUnit - 1) / kRingUnit * kRingUnit);
        group.notify(from, Channel::kMailbox);  // there is room again
      }
      if (!incoming.active || incoming.done < incoming.contents.num_bytes) break;
      incoming.active = false;
      if (incoming.wanted) {
        finish(incoming.ticket, from, incoming.passage);
      } else {
        peer.aside.push_back({incoming.tag, incoming.contents.dtype, incoming.passage, std::move(incoming.aside)});
        serve_aside(from);
      }
    }
  }

  // Hands set-aside messages of a peer to receives posted meanwhile, oldest first.
  void serve_aside(int from) {
    auto& aside = peers[from].aside;
    for (auto message = aside.begin(); message != aside.end();) {
      const auto match =
          std::find_if(posted.begin(), posted.end(), [&](const Posted& p) { return fits(p, from, message->tag); });
      if (match == posted.end()) {
        ++message;
        continue;
      }
      check_contents(*match, from, {message->bytes.size(), message->dtype});
      std::copy(message->bytes.begin(), message->bytes.end(), match->data);
      finish(match->ticket, from, message->passage);
      posted.erase(match);
      message = aside.erase(message);
    }
  }

  void check() const {
    group.check();
    if (closed) throw Error(cat("rank ", group.rank(), " shut the group down before the message arrived"));
  }

  void progress() {
    if (closed || broken) return;
    for (int peer = 0; peer < group.size(); ++peer) {
      if (peer == group.rank()) continue;
      push(peer);
      pull(peer);
    }
  }

  Group& group;
  const DescribeContents describe;
  Staging staging;
  std::vector<Peer> peers;
  std::vector<Posted> posted;  // in the order posted
  Tickets<Operation> operations;
  bool closed = false;
  bool broken = false;  // an operation has failed: its memory, and that of all others, may be gone at any time
};

Mailbox::Mailbox(std::shared_ptr<Group> group, DescribeContents describe)
    : group_(std::move(group)), state_(std::make_unique<State>(*group_, describe)) {}

Mailbox::~Mailbox() = default;

// Runs `step` under the lock; an error in it is everybody's end, since half a message cannot be taken back.
template <typename Step>
auto Mailbox::guarded(const Step& step) {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    return step();
  } catch (const std::exception& error) {
    state_->broken = true;
    if (!state_->closed) group_->abort(error.what());
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
    state_->check();
    const Ticket ticket = state_->add(peer, tag, contents, true);
    state_->peers[peer].outgoing.push_back(
        {ticket, tag, static_cast<const std::byte*>(data), contents, 0, false, {}, {}, false});
    state_->push(peer);
    return ticket;
  });
}

Mailbox::Ticket Mailbox::post(int peer, int32_t tag, void* data, Contents contents) {
  return guarded([&] {
    state_->check();
    const Ticket ticket = state_->add(peer, tag, contents, false);
    state_->posted.push_back({ticket, peer, tag, static_cast<std::byte*>(data), contents});
    for (int from = 0; from < group_->size(); ++from) {
      if (from == group_->rank() || (peer != kAnyPeer && peer != from)) continue;
      state_->serve_aside(from);
      state_->pull(from);
    }
    return ticket;
  });
}

Mailbox::Ticket Mailbox::post_recv(int peer, int32_t tag, void* data, Contents contents) {
  check_peer(peer);
  return post(peer, tag, data, contents);
}

Mailbox::Ticket Mailbox::post_recv_any(int32_t tag, void* data, Contents contents) {
  return post(kAnyPeer, tag, data, contents);
}

class Mailbox::Done final : public Awaited {
 public:
  Done(Mailbox& mailbox, Ticket ticket) : mailbox_(mailbox), ticket_(ticket) {}

  bool ready() override { return mailbox_.is_done(ticket_); }

  uint64_t missing() override {
    std::lock_guard<std::mutex> lock(mailbox_.mutex_);
    const Operation& operation = mailbox_.state_->operations.at(ticket_);
    if (operation.peer != kAnyPeer) return uint64_t{1} << operation.peer;
    const uint64_t all = (uint64_t{2} << (mailbox_.group_->size() - 1)) - 1;
    return all & ~(uint64_t{1} << mailbox_.group_->rank());
  }

  // From any rank: as long as one is there it may still send.
  bool is_hopeless(uint64_t left) override { return (missing() & ~left) == 0; }

  std::string describe() override {
    std::lock_guard<std::mutex> lock(mailbox_.mutex_);
    const Operation& operation = mailbox_.state_->operations.at(ticket_);
    const std::string peer = operation.peer == kAnyPeer ? "any rank" : cat("rank ", operation.peer);
    return cat(operation.is_send ? "send of " : "recv of ", mailbox_.state_->describe(operation.contents), " with tag ",
               operation.tag, operation.is_send ? " to " : " from ", peer);
  }

 private:
  Mailbox& mailbox_;
  const Ticket ticket_;
};

bool Mailbox::is_done(Ticket ticket) {
  return guarded([&] {
    const Operation* const operation = state_->operations.find(ticket);
    if (operation == nullptr) throw Error(cat("nothing was posted under ticket ", ticket));
    if (!operation->done) state_->progress();
    if (!operation->done) state_->check();
    return operation->done;
  });
}

void Mailbox::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  state_->closed = true;
}

int Mailbox::wait(Ticket ticket, Passage* passage) {
  Done done(*this, ticket);
  try {
    group_->wait(Channel::kMailbox, done);
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    state_->broken = true;
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const Operation operation = state_->operations.at(ticket);
  state_->operations.remove(ticket);
  if (passage != nullptr) *passage = operation.passage;
  return operation.peer;
}

}  // namespace torchtp::shm
