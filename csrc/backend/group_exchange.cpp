#include "backend/group_exchange.h"

#include <algorithm>
#include <cstring>

#include "backend/dense.h"
#include "core/format.h"

namespace torchtp::backend {
namespace {

// gloo ends a process that is sent more than it asked for, so a message's size is agreed on before it is met: the first
// message to a peer always has as many bytes, the header and as much of the payload as fits; what is left follows in a
// second one whose tag tells its size, so that a receiver with another size in mind never meets it.
constexpr size_t kHeaderBytes = 64;
constexpr size_t kFirstBytes = 16384;
constexpr size_t kFirstPayload = kFirstBytes - kHeaderBytes;

// Tags wrap: far later than as many exchanges can be under way at once. Users' own tags are hardly that large.
int first_tag(uint64_t ticket) { return static_cast<int>((1u << 29) | ticket % (1 << 16)); }

int rest_tag(uint64_t ticket, size_t num_bytes) {
  const uint64_t size = (num_bytes ^ (num_bytes >> 20)) % (1 << 20);
  return static_cast<int>((1u << 30) | (ticket % (1 << 10)) << 20 | size);
}

struct Header {
  uint64_t ticket;
  uint64_t num_bytes;
  uint32_t layout;
};

at::Tensor make_buffer(size_t num_bytes) {
  return at::empty({static_cast<int64_t>(num_bytes)}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace

GroupExchange::GroupExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : GroupExchange(group->getRank(), group->getSize(),
                    [weak = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)](at::Tensor buffer, int peer, int tag,
                                                                                bool sends) {
                      const auto group = weak.lock();
                      if (!group) throw Error("exchange: the process group has been destroyed");
                      std::vector<at::Tensor> list{std::move(buffer)};
                      return sends ? group->send(list, peer, tag) : group->recv(list, peer, tag);
                    }) {}

GroupExchange::GroupExchange(int rank, int size, Post post) : rank_(rank), size_(size), post_(std::move(post)) {}

uint64_t GroupExchange::start(std::vector<exchange::Send> sends, std::vector<exchange::Receive> receives) {
  const uint64_t ticket = tickets_.next();
  Pending pending;
  std::stable_sort(receives.begin(), receives.end(),
                   [](const exchange::Receive& a, const exchange::Receive& b) { return a.peer < b.peer; });
  const auto ask = [&](size_t num_bytes, int peer, int tag) {
    at::Tensor buffer = make_buffer(num_bytes);
    auto work = post_(buffer, peer, tag, false);
    return Message{std::move(buffer), std::move(work)};
  };
  for (exchange::Receive& receive : receives) {
    Message first = ask(kFirstBytes, receive.peer, first_tag(ticket));
    Arrival arrival{std::move(receive), std::move(first), {}};
    const size_t num_bytes = arrival.receive.num_bytes;
    if (num_bytes > kFirstPayload) {
      arrival.rest = ask(num_bytes - kFirstPayload, arrival.receive.peer, rest_tag(ticket, num_bytes));
    }
    pending.arrivals.push_back(std::move(arrival));
  }
  const auto give = [&](at::Tensor buffer, int peer, int tag) {
    auto work = post_(buffer, peer, tag, true);
    pending.departures.push_back({std::move(buffer), std::move(work)});
  };
  for (const exchange::Send& send : sends) {
    at::Tensor first = make_buffer(kFirstBytes);
    const Header header{ticket, send.num_bytes, send.layout};
    std::memset(bytes_of(first), 0, kHeaderBytes);
    std::memcpy(bytes_of(first), &header, sizeof(header));
    const size_t begun = std::min(send.num_bytes, kFirstPayload);
    if (begun > 0) send.source->read(0, bytes_of(first) + kHeaderBytes, begun);
    give(std::move(first), send.peer, first_tag(ticket));
    if (begun == send.num_bytes) continue;
    at::Tensor rest = make_buffer(send.num_bytes - begun);
    send.source->read(begun, bytes_of(rest), send.num_bytes - begun);
    give(std::move(rest), send.peer, rest_tag(ticket, send.num_bytes));
  }
  tickets_.put(ticket, std::move(pending));
  return ticket;
}

void GroupExchange::finish(uint64_t ticket) {
  Pending pending = tickets_.take(ticket);
  for (Arrival& arrival : pending.arrivals) {
    arrival.first.work->wait();
    Header header;
    std::memcpy(&header, bytes_of(arrival.first.buffer), sizeof(header));
    const exchange::Receive& receive = arrival.receive;
    if (header.ticket != ticket || header.num_bytes != receive.num_bytes) {
      throw Error(cat("rank ", rank_, " expects ", receive.num_bytes, " bytes from rank ", receive.peer, " (exchange #",
                      ticket, "), but rank ", receive.peer, " sent ", header.num_bytes, " bytes (exchange #",
                      header.ticket, ")"));
    }
    if (receive.num_bytes == 0) continue;
    const size_t begun = std::min(receive.num_bytes, kFirstPayload);
    receive.sink->write(header.layout, 0, bytes_of(arrival.first.buffer) + kHeaderBytes, begun);
    if (begun == receive.num_bytes) continue;
    arrival.rest.work->wait();
    receive.sink->write(header.layout, begun, bytes_of(arrival.rest.buffer), receive.num_bytes - begun);
  }
  for (Message& departure : pending.departures) departure.work->wait();
}

}  // namespace torchtp::backend
