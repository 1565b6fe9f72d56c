#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/tickets.h"

namespace torchtp::backend {

// Exchange by ordinary point-to-point calls, of any c10d group (gloo, mpi, ...): one message a peer, or two.
class GroupExchange : public exchange::Exchange {
 public:
  // Sends or receives `buffer`.
  using Post = std::function<c10::intrusive_ptr<c10d::Work>(at::Tensor buffer, int peer, int tag, bool sends)>;

  explicit GroupExchange(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  GroupExchange(int rank, int size, Post post);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  uint64_t start(std::vector<exchange::Send> sends, std::vector<exchange::Receive> receives) override;
  void finish(uint64_t ticket) override;

 private:
  struct Message {
    at::Tensor buffer;
    c10::intrusive_ptr<c10d::Work> work;
  };
  struct Arrival {
    exchange::Receive receive;
    Message first;
    Message rest;
  };
  struct Pending {
    std::vector<Arrival> arrivals;
    std::vector<Message> departures;
  };

  const int rank_;
  const int size_;
  const Post post_;
  exchange::Tickets<Pending> tickets_;
};

}  // namespace torchtp::backend
