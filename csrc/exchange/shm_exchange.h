#pragma once

#include <memory>
#include <mutex>

#include "exchange/exchange.h"
#include "shm/group.h"

namespace torchtp::exchange {

// The exchange between ranks of one host: one byte ring in shared memory for each ordered pair. One exchange a group.
// Sources and sinks are called by whichever thread is in start() or finish(); they may be called until their ticket is
// finished and are dropped then. Thread-safe.
class ShmExchange final : public Exchange {
 public:
  explicit ShmExchange(std::shared_ptr<shm::Group> group);
  ~ShmExchange() override;

  // The ranks it moves between.
  const std::shared_ptr<shm::Group>& group() const { return group_; }
  int rank() const override;
  int size() const override;
  uint64_t start(std::vector<Send> sends, std::vector<Receive> receives) override;
  void finish(uint64_t ticket) override { finish_telling(ticket); }
  LastSender finish_telling(uint64_t ticket) override;

 private:
  class Progress;
  struct State;

  template <typename Step>
  auto guarded(const Step& step);

  std::shared_ptr<shm::Group> group_;
  std::mutex mutex_;
  std::unique_ptr<State> state_;
};

}  // namespace torchtp::exchange
