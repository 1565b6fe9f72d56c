#include "backend/hosts_exchange.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace torchtp::backend {

// The slabs of one exchange, written in the order of ranks. Each of the two transports writes in that order, but the
// one inside the host writes when others finish, too, and knows nothing of the other: what comes before its turn is
// kept.
class HostsExchange::Turns {
 public:
  using Turn = std::pair<int, size_t>;  // the rank, and the place among the receives

  void expect(Turn turn, size_t num_bytes, std::shared_ptr<exchange::Sink> sink) {
    if (num_bytes > 0) slabs_[turn] = {std::move(sink), num_bytes, 0, 0, {}};
  }

  void write(Turn turn, uint32_t layout, size_t offset, const std::byte* in, size_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    Slab& slab = slabs_.at(turn);
    slab.layout = layout;
    if (slabs_.begin()->first == turn) {
      slab.sink->write(layout, offset, in, num_bytes);
      slab.written = offset + num_bytes;
      go_on();
    } else {
      slab.kept.insert(slab.kept.end(), in, in + num_bytes);
    }
  }

 private:
  struct Slab {
    std::shared_ptr<exchange::Sink> sink;
    size_t num_bytes;
    size_t written;
    uint32_t layout;
    std::vector<std::byte> kept;
  };

  void go_on() {
    while (!slabs_.empty()) {
      Slab& slab = slabs_.begin()->second;
      if (!slab.kept.empty()) {
        slab.sink->write(slab.layout, 0, slab.kept.data(), slab.kept.size());
        slab.written = slab.kept.size();
        slab.kept = {};
      }
      if (slab.written < slab.num_bytes) return;
      slabs_.erase(slabs_.begin());
    }
  }

  std::mutex mutex_;
  std::map<Turn, Slab> slabs_;  // not yet written whole
};

class HostsExchange::InTurn final : public exchange::Sink {
 public:
  InTurn(Turns::Turn turn, std::shared_ptr<Turns> turns) : turn_(turn), turns_(std::move(turns)) {}

  void write(uint32_t layout, size_t offset, const std::byte* in, size_t num_bytes) override {
    turns_->write(turn_, layout, offset, in, num_bytes);
  }

 private:
  const Turns::Turn turn_;
  const std::shared_ptr<Turns> turns_;
};

HostsExchange::HostsExchange(int rank, std::vector<int> indices, std::shared_ptr<shm::Group> host,
                             GroupExchange::Post post, std::function<void()> failed)
    : rank_(rank),
      indices_(std::move(indices)),
      here_(std::move(host)),
      beyond_(rank, static_cast<int>(indices_.size()), std::move(post)),
      failed_(std::move(failed)) {}

template <typename Body>
auto HostsExchange::guarded(const Body& body) {
  try {
    return body();
  } catch (...) {
    failed_();
    throw;
  }
}

uint64_t HostsExchange::start(std::vector<exchange::Send> sends, std::vector<exchange::Receive> receives) {
  const auto turns = std::make_shared<Turns>();
  std::vector<exchange::Send> sends_here, sends_beyond;
  std::vector<exchange::Receive> receives_here, receives_beyond;
  for (exchange::Send& send : sends) {
    const int index = indices_.at(send.peer);
    if (index >= 0) send.peer = index;
    (index >= 0 ? sends_here : sends_beyond).push_back(std::move(send));
  }
  for (size_t i = 0; i < receives.size(); ++i) {
    exchange::Receive& receive = receives[i];
    const int index = indices_.at(receive.peer);
    turns->expect({receive.peer, i}, receive.num_bytes, std::move(receive.sink));
    receive.sink = std::make_shared<InTurn>(Turns::Turn{receive.peer, i}, turns);
    if (index >= 0) receive.peer = index;
    (index >= 0 ? receives_here : receives_beyond).push_back(std::move(receive));
  }
  Pending pending{0, 0, turns};
  return guarded([&] {
    pending.beyond = beyond_.start(std::move(sends_beyond), std::move(receives_beyond));
    pending.here = here_.start(std::move(sends_here), std::move(receives_here));
    return tickets_.put(std::move(pending));
  });
}

// Messages from other hosts were sent whole when their ranks started, so waiting for them first holds up nobody.
exchange::LastSender HostsExchange::finish_telling(uint64_t ticket) {
  const Pending pending = tickets_.take(ticket);
  exchange::LastSender last = guarded([&] {
    beyond_.finish(pending.beyond);
    return here_.finish_telling(pending.here);
  });
  if (last.peer >= 0) {
    last.peer = static_cast<int>(std::find(indices_.begin(), indices_.end(), last.peer) - indices_.begin());
  }
  return last;
}

}  // namespace torchtp::backend
