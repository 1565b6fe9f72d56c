#include "exchange/shm_exchange.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "core/claim_lines.h"
#include "core/clock.h"
#include "core/format.h"
#include "core/staging.h"
#include "core/stream_copy.h"
#include "shm/ring.h"

namespace torchtp::exchange {

using shm::Channel;
using shm::kRingUnit;

namespace {

// Longer messages walk through so much of the ring that no cache keeps it; to claim lines that come from memory costs
// 4 MB a half more than it gives.
constexpr size_t kMostClaimedBytes = size_t{512} << 10;

// Goes before every message, one unit of the ring.
struct alignas(kRingUnit) Header {
  uint64_t num_bytes;
  uint64_t sequence;  // of the message from this rank to that one
  uint64_t ticket;
  int64_t began_ns;
  uint32_t layout;
  Staging::Ways ways;
};

struct Outgoing {
  uint64_t ticket;
  Send send;
  size_t done;
  bool begun;
  Staging::Ways ways;
};

struct Incoming {
  uint64_t ticket;
  Receive receive;
  size_t done;
  bool begun;
  uint32_t layout;
  Staging::Ways ways;
};

struct Peer {
  shm::RingWriter writer;
  shm::RingReader reader;
  std::deque<Outgoing> outgoing;
  std::deque<Incoming> incoming;
  uint64_t sent;
  uint64_t received;
};

struct UnderWay {
  size_t sends_left;
  std::vector<int> receive_order;  // peers, ascending
  size_t received;                 // how many of receive_order are done
  LastSender last;
};

}  // namespace

struct ShmExchange::State {
  explicit State(shm::Group& g) : group(g) {
    peers.reserve(g.size());
    for (int peer = 0; peer < g.size(); ++peer) {
      peers.push_back({g.ring_to(peer, Channel::kExchange), g.ring_from(peer, Channel::kExchange), {}, {}, 0, 0});
    }
  }

  void push(int to) {
    Peer& peer = peers[to];
    while (!peer.outgoing.empty()) {
      Outgoing& message = peer.outgoing.front();
      const size_t num_bytes = message.send.num_bytes;
      if (!message.begun) peer.writer.begin_message(sizeof(Header) + num_bytes);
      while (!message.begun || message.done < num_bytes) {
        const size_t header_bytes = message.begun ? 0 : sizeof(Header);
        const size_t wanted = Staging::piece_of_message(num_bytes, message.done);
        size_t room = header_bytes + wanted;
        std::byte* const place = peer.writer.room(room);
        if (room < std::max<size_t>(header_bytes, 1)) return;
        if (!message.begun) {
          message.ways = staging.ways_of_message(num_bytes);
          const Header header{num_bytes, ++peer.sent, message.ticket, now_ns(), message.send.layout, message.ways};
          std::memcpy(place, &header, sizeof(header));
          message.begun = true;
        }
        const size_t piece = std::min(room - header_bytes, wanted);
        if (piece > 0) pack(message, place + header_bytes, piece);
        message.done += piece;
        peer.writer.publish(room);
        group.notify(to, Channel::kExchange);
      }
      --tickets.at(message.ticket).sends_left;
      finished.push_back(std::move(message.send.source));
      peer.outgoing.pop_front();
    }
  }

  // By way of memory that stays in the first-level cache: sources may write in small bits, which must not go past it.
  void pack(const Outgoing& message, std::byte* out, size_t num_bytes) {
    const Source& source = *message.send.source;
    const Staging::Copy way(staging, Staging::Side::kWrite, message.ways, message.done, num_bytes);
    if (!way.past()) return source.read(message.done, out, num_bytes);
    for (size_t done = 0; done < num_bytes; done += scratch.size()) {
      const size_t part = std::min(scratch.size(), num_bytes - done);
      source.read(message.done + done, scratch.data(), part);
      stream_copy(out + done, scratch.data(), part);
    }
  }

  void pull(int from) {
    Peer& peer = peers[from];
    while (!peer.incoming.empty()) {
      Incoming& message = peer.incoming.front();
      UnderWay& ticket = tickets.at(message.ticket);
      if (ticket.receive_order[ticket.received] != from) return;
      const size_t num_bytes = message.receive.num_bytes;
      while (!message.begun || message.done < num_bytes) {
        size_t news = 0;
        std::byte* place = peer.reader.news(news);
        if (news == 0) return;
        size_t header_bytes = 0;
        if (!message.begun) {
          Header header;
          std::memcpy(&header, place, sizeof(header));
          claim_lines(place, sizeof(header));
          check(from, message, header);
          message.layout = header.layout;
          message.ways = header.ways;
          if (header.began_ns > ticket.last.began_ns) ticket.last = {from, header.began_ns};
          message.begun = true;
          header_bytes = sizeof(header);
          place += header_bytes;
        }
        const size_t piece = std::min(news - header_bytes, Staging::piece_of_message(num_bytes, message.done));
        if (piece > 0) {
          const Staging::Copy timed(staging, Staging::Side::kRead, message.ways, message.done, piece);
          message.receive.sink->write(message.layout, message.done, place, piece);
          if (num_bytes <= kMostClaimedBytes) claim_lines(place, piece);
        }
        message.done += piece;
        peer.reader.consume(header_bytes + (piece + kRingUnit - 1) / kRingUnit * kRingUnit);
        group.notify(from, Channel::kExchange);
      }
      ++ticket.received;
      finished.push_back(std::move(message.receive.sink));
      peer.incoming.pop_front();
    }
  }

  void check(int from, const Incoming& message, const Header& header) {
    const uint64_t sequence = ++peers[from].received;
    if (header.ticket == message.ticket && header.num_bytes == message.receive.num_bytes &&
        header.sequence == sequence) {
      return;
    }
    throw Error(cat("rank ", group.rank(), " expects ", message.receive.num_bytes, " bytes from rank ", from,
                    " as message ", sequence, " (exchange #", message.ticket, "), but rank ", from, " sent ",
                    header.num_bytes, " bytes as message ", header.sequence, " (exchange #", header.ticket,
                    "): the ranks do not agree on the geometry or on the order of exchanges"));
  }

  bool is_done(uint64_t ticket) const {
    const UnderWay& under_way = tickets.at(ticket);
    return under_way.sends_left == 0 && under_way.received == under_way.receive_order.size();
  }

  // Sends first: they are what others wait for. Ascending, so that a peer's data sees the lower peers' done.
  void progress() {
    for (int peer = 0; peer < group.size(); ++peer) push(peer);
    for (int peer = 0; peer < group.size(); ++peer) pull(peer);
  }

  shm::Group& group;
  std::vector<Peer> peers;
  Staging staging;
  std::vector<std::byte> scratch = std::vector<std::byte>(size_t{16} << 10);
  std::unordered_map<uint64_t, UnderWay> tickets;
  uint64_t last_ticket = 0;
  std::vector<std::shared_ptr<const void>> finished;  // sources and sinks nobody needs any more
};

// Runs `step` under the lock; an error in it is everybody's end, since half a message cannot be taken back. Sources and
// sinks are dropped after the lock: what they hold may need another lock to go away, whose owner may wait for ours.
template <typename Step>
auto ShmExchange::guarded(const Step& step) {
  std::vector<std::shared_ptr<const void>> finished;
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    auto result = step();
    finished.swap(state_->finished);
    return result;
  } catch (const std::exception& error) {
    group_->abort(error.what());
    group_->check();
    throw;
  }
}

// Everything of one ticket has left and arrived.
class ShmExchange::Progress final : public shm::Awaited {
 public:
  Progress(ShmExchange& exchange, uint64_t ticket) : exchange_(exchange), ticket_(ticket) {}

  bool ready() override {
    return exchange_.guarded([&] {
      State& state = *exchange_.state_;
      if (state.is_done(ticket_)) return true;
      state.progress();
      return state.is_done(ticket_);
    });
  }

  // Who does not read what we send, or has sent nothing more of what we wait for. A message that is in its ring but has
  // to let a lower rank's go first is not missing.
  uint64_t missing() override {
    std::lock_guard<std::mutex> lock(exchange_.mutex_);
    auto& peers = exchange_.state_->peers;
    const auto mine = [this](const auto& message) { return message.ticket == ticket_; };
    uint64_t mask = 0;
    for (size_t rank = 0; rank < peers.size(); ++rank) {
      Peer& peer = peers[rank];
      size_t news = 0;
      peer.reader.news(news);
      if (std::any_of(peer.outgoing.begin(), peer.outgoing.end(), mine) ||
          (news == 0 && std::any_of(peer.incoming.begin(), peer.incoming.end(), mine))) {
        mask |= uint64_t{1} << rank;
      }
    }
    return mask;
  }

  std::string describe() override {
    std::lock_guard<std::mutex> lock(exchange_.mutex_);
    std::string text;
    const auto& peers = exchange_.state_->peers;
    for (size_t peer = 0; peer < peers.size(); ++peer) {
      for (const Outgoing& message : peers[peer].outgoing) {
        if (message.ticket == ticket_)
          text += cat(text.empty() ? "" : ", ", message.send.num_bytes, " bytes to rank ", peer);
      }
      for (const Incoming& message : peers[peer].incoming) {
        if (message.ticket == ticket_)
          text += cat(text.empty() ? "" : ", ", message.receive.num_bytes, " bytes from rank ", peer);
      }
    }
    return cat("exchange #", ticket_, " (", text, ")");
  }

 private:
  ShmExchange& exchange_;
  const uint64_t ticket_;
};

ShmExchange::ShmExchange(std::shared_ptr<shm::Group> group)
    : group_(std::move(group)), state_(std::make_unique<State>(*group_)) {}

ShmExchange::~ShmExchange() = default;

int ShmExchange::rank() const { return group_->rank(); }
int ShmExchange::size() const { return group_->size(); }

uint64_t ShmExchange::start(std::vector<Send> sends, std::vector<Receive> receives) {
  group_->check();
  return guarded([&] {
    const uint64_t ticket = ++state_->last_ticket;
    UnderWay& under_way = state_->tickets[ticket];
    under_way.sends_left = sends.size();
    for (Receive& receive : receives) {
      under_way.receive_order.push_back(receive.peer);
      state_->peers.at(receive.peer).incoming.push_back({ticket, std::move(receive), 0, false, 0, {}});
    }
    std::sort(under_way.receive_order.begin(), under_way.receive_order.end());
    for (Send& send : sends) {
      const int peer = send.peer;
      state_->peers.at(peer).outgoing.push_back({ticket, std::move(send), 0, false, {}});
      state_->push(peer);
    }
    return ticket;
  });
}

LastSender ShmExchange::finish_telling(uint64_t ticket) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_->tickets.count(ticket) == 0) throw Error(cat("no exchange ", ticket, " is under way"));
  }
  Progress progress(*this, ticket);
  group_->wait(Channel::kExchange, progress);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto under_way = state_->tickets.find(ticket);
  const LastSender last = under_way->second.last;
  state_->tickets.erase(under_way);
  return last;
}

}  // namespace torchtp::exchange
