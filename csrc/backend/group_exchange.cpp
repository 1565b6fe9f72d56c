#include "backend/group_exchange.h"

#include <cstring>

#include "core/error.h"

namespace torchtp::backend {
namespace {

// The sender's layout travels in front of the payload; 64 bytes keep the payload aligned.
constexpr size_t kHeaderBytes = 64;
// Tags wrap: far more than the exchanges that can be under way at once.
constexpr uint64_t kNumTags = 1 << 16;

struct Header {
  uint64_t ticket;
  uint64_t num_bytes;
  uint32_t layout;
};

std::byte* bytes_of(const at::Tensor& buffer) { return reinterpret_cast<std::byte*>(buffer.data_ptr<uint8_t>()); }

at::Tensor make_buffer(size_t num_bytes) {
  return at::empty({static_cast<int64_t>(kHeaderBytes + num_bytes)}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace

GroupExchange::GroupExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : group_(group), rank_(group->getRank()), size_(group->getSize()) {}

uint64_t GroupExchange::start(std::vector<exchange::Send> sends, std::vector<exchange::Receive> receives) {
  const auto group = group_.lock();
  if (!group) throw Error("exchange: the process group has been destroyed");
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ticket = next_ticket_++;
  }
  const int tag = static_cast<int>(ticket % kNumTags);
  Pending pending;
  for (exchange::Receive& receive : receives) {
    at::Tensor buffer = make_buffer(receive.num_bytes);
    std::vector<at::Tensor> list{buffer};
    auto work = group->recv(list, receive.peer, tag);
    pending.arrivals.push_back({std::move(receive), std::move(buffer), std::move(work)});
  }
  for (const exchange::Send& send : sends) {
    at::Tensor buffer = make_buffer(send.num_bytes);
    const Header header{ticket, send.num_bytes, send.layout};
    std::memset(bytes_of(buffer), 0, kHeaderBytes);
    std::memcpy(bytes_of(buffer), &header, sizeof(header));
    send.source->read(0, bytes_of(buffer) + kHeaderBytes, send.num_bytes);
    std::vector<at::Tensor> list{buffer};
    auto work = group->send(list, send.peer, tag);
    pending.departures.push_back({std::move(buffer), std::move(work)});
  }
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.emplace(ticket, std::move(pending));
  return ticket;
}

void GroupExchange::finish(uint64_t ticket) {
  Pending pending;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pending_.find(ticket);
    if (found == pending_.end()) throw Error("exchange: ticket " + std::to_string(ticket) + " is not under way");
    pending = std::move(found->second);
    pending_.erase(found);
  }
  for (Arrival& arrival : pending.arrivals) {
    arrival.work->wait();
    Header header;
    std::memcpy(&header, bytes_of(arrival.buffer), sizeof(header));
    if (header.ticket != ticket || header.num_bytes != arrival.receive.num_bytes) {
      throw Error("exchange " + std::to_string(ticket) + ": rank " + std::to_string(arrival.receive.peer) + " sent " +
                  std::to_string(header.num_bytes) + " bytes of exchange " + std::to_string(header.ticket) +
                  ", but rank " + std::to_string(rank_) + " waits for " + std::to_string(arrival.receive.num_bytes));
    }
    arrival.receive.sink->write(header.layout, 0, bytes_of(arrival.buffer) + kHeaderBytes, header.num_bytes);
  }
  for (Departure& departure : pending.departures) departure.work->wait();
}

}  // namespace torchtp::backend
