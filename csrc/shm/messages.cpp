#include "shm/messages.h"

#include <algorithm>
#include <cstring>

#include "core/claim_lines.h"
#include "core/clock.h"
#include "core/format.h"
#include "core/stream_copy.h"

namespace torchtp::shm {

// Goes before every message, one unit of the ring.
struct alignas(kRingUnit) Messages::Header {
  uint64_t num_bytes;
  uint64_t sequence;
  int64_t began_ns;
  int32_t tag;
  Staging::Ways ways;
  uint8_t dtype;
};

Messages::Messages(Group& group, DescribeContents describe) : group_(group), describe_(describe) {
  peers_.reserve(group.size());
  for (int peer = 0; peer < group.size(); ++peer) {
    peers_.push_back({group.ring_to(peer, Channel::kMailbox), group.ring_from(peer, Channel::kMailbox), {}, {}, {}});
  }
}

Messages::Ticket Messages::send(int peer, int32_t tag, const std::byte* data, Contents contents) {
  const Ticket ticket = operations_.add({peer, tag, contents, true, false, {}});
  peers_[peer].outgoing.push_back({ticket, tag, data, contents, 0, false, {}, {}, false});
  push(peer);
  return ticket;
}

Messages::Ticket Messages::receive(int peer, int32_t tag, std::byte* data, Contents contents) {
  const Ticket ticket = operations_.add({peer, tag, contents, false, false, {}});
  posted_.push_back({ticket, peer, tag, data, contents});
  for (int from = 0; from < group_.size(); ++from) {
    if (from == group_.rank() || (peer != kAnyPeer && peer != from)) continue;
    serve_aside(from);
    pull(from);
  }
  return ticket;
}

std::string Messages::describe(Ticket ticket) {
  const Operation& operation = operations_.at(ticket);
  const std::string peer = operation.peer == kAnyPeer ? "any rank" : cat("rank ", operation.peer);
  return cat(operation.is_send ? "send of " : "recv of ", describe_(operation.contents), " with tag ", operation.tag,
             operation.is_send ? " to " : " from ", peer);
}

void Messages::progress() {
  if (closed_ || broken_) return;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    push(peer);
    pull(peer);
  }
}

void Messages::push(int to) {
  Peer& peer = peers_[to];
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
      Staging::Copy(staging_, Staging::Side::kWrite, message.ways, message.done, piece)
          .run(place + header_bytes, message.data + message.done);
      message.done += piece;
      peer.writer.publish(room);
      ++peer.moves;
      group_.notify(to, Channel::kMailbox);
    }
    finish(message.ticket, to, message.passage);
    peer.outgoing.pop_front();
  }
}

void Messages::begin(Peer& peer, Outgoing& message, std::byte* place) {
  message.passage.number = ++peer.sent;
  message.ways = staging_.ways_of_message(message.contents.num_bytes);
  const Header header{message.contents.num_bytes, message.passage.number, now_ns(), message.tag, message.ways,
                      message.contents.dtype};
  std::memcpy(place, &header, sizeof(header));
  message.begun = true;
}

bool Messages::has_room(Outgoing& message, size_t room, size_t least) {
  if (room < least) {
    message.is_stuck = true;
    return false;
  }
  if (message.is_stuck && message.passage.came_ns == 0) message.passage.came_ns = now_ns();
  return true;
}

void Messages::pull(int from) {
  Peer& peer = peers_[from];
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
        const Staging::Copy timed(staging_, Staging::Side::kRead, incoming.ways, incoming.done, piece);
        claiming_copy(incoming.data + incoming.done, place, piece, incoming.contents.num_bytes);
      } else {  // grows with what comes, whatever length the header claims
        incoming.aside.insert(incoming.aside.end(), place, place + piece);
      }
      incoming.done += piece;
      peer.reader.consume(header_bytes + (piece + kRingUnit - 1) / kRingUnit * kRingUnit);
      ++peer.moves;
      group_.notify(from, Channel::kMailbox);  // there is room again
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

// Decides where a message goes whose header stands at the front of the ring.
void Messages::take_header(int from, const Header& header) {
  Peer& peer = peers_[from];
  if (header.sequence != ++peer.received) {
    throw Error(
        cat("message ", peer.received, " from rank ", from, " is damaged: it says it is message ", header.sequence));
  }
  const auto match =
      std::find_if(posted_.begin(), posted_.end(), [&](const Posted& p) { return fits(p, from, header.tag); });
  if (match != posted_.end()) check_contents(*match, from, {header.num_bytes, header.dtype});
  peer.incoming = {};
  Incoming& incoming = peer.incoming;
  incoming.active = true;
  incoming.passage = {header.sequence, header.began_ns};
  incoming.ways = header.ways;
  incoming.tag = header.tag;
  incoming.contents = {header.num_bytes, header.dtype};
  incoming.wanted = match != posted_.end();
  if (incoming.wanted) {
    incoming.ticket = match->ticket;
    incoming.data = match->data;
    posted_.erase(match);
  }
}

// Hands set-aside messages of a peer to receives posted meanwhile, oldest first.
void Messages::serve_aside(int from) {
  auto& aside = peers_[from].aside;
  for (auto message = aside.begin(); message != aside.end();) {
    const auto match =
        std::find_if(posted_.begin(), posted_.end(), [&](const Posted& p) { return fits(p, from, message->tag); });
    if (match == posted_.end()) {
      ++message;
      continue;
    }
    check_contents(*match, from, {message->bytes.size(), message->dtype});
    std::copy(message->bytes.begin(), message->bytes.end(), match->data);
    finish(match->ticket, from, message->passage);
    posted_.erase(match);
    message = aside.erase(message);
  }
}

bool Messages::fits(const Posted& receive, int peer, int32_t tag) {
  return (receive.peer == peer || receive.peer == kAnyPeer) && receive.tag == tag;
}

bool Messages::is_wanted(int from) const {
  return std::any_of(posted_.begin(), posted_.end(),
                     [&](const Posted& p) { return p.peer == from || p.peer == kAnyPeer; });
}

void Messages::check_contents(const Posted& receive, int from, const Contents& sent) const {
  if (receive.contents == sent) return;
  throw Error(cat("rank ", group_.rank(), " receives ", describe_(receive.contents), " with tag ", receive.tag,
                  " from rank ", from, ", which sent ", describe_(sent)));
}

void Messages::finish(Ticket ticket, int peer, const Passage& passage) {
  Operation& operation = operations_.at(ticket);
  operation.peer = peer;
  operation.passage = passage;
  operation.done = true;
}

void Messages::check() const {
  group_.check();
  if (closed_) throw Error(cat("rank ", group_.rank(), " shut the group down before the message arrived"));
}

}  // namespace torchtp::shm
