#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "backend/group_exchange.h"
#include "exchange/shm_exchange.h"
#include "exchange/tickets.h"

namespace torchtp::backend {

// Slabs of ranks of several hosts: over shared memory inside this rank's host, as messages to the others.
class HostsExchange : public exchange::Exchange {
 public:
  // indices[r]: the place of rank r in the group `host` of this host; -1 for ranks of other hosts. `failed` is called
  // when an exchange has thrown.
  HostsExchange(int rank, std::vector<int> indices, std::shared_ptr<shm::Group> host, GroupExchange::Post post,
                std::function<void()> failed);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(indices_.size()); }
  uint64_t start(std::vector<exchange::Send> sends, std::vector<exchange::Receive> receives) override;
  void finish(uint64_t ticket) override { finish_telling(ticket); }
  exchange::LastSender finish_telling(uint64_t ticket) override;  // knows those of this host

 private:
  class Turns;
  class InTurn;

  template <typename Body>
  auto guarded(const Body& body);

  struct Pending {
    uint64_t here;
    uint64_t beyond;
    std::shared_ptr<Turns> turns;
  };

  const int rank_;
  const std::vector<int> indices_;
  exchange::ShmExchange here_;
  GroupExchange beyond_;
  const std::function<void()> failed_;
  exchange::Tickets<Pending> tickets_;
};

}  // namespace torchtp::backend
