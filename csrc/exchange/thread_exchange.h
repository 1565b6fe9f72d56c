#pragma once

#include <chrono>
#include <memory>

#include "exchange/exchange.h"

namespace torchtp::exchange {

// What ranks that are threads of one process share: make one, hand it to every rank's ThreadExchange.
class ThreadHub;
std::shared_ptr<ThreadHub> make_thread_hub(int size, std::chrono::milliseconds timeout);

// The simplest exchange there is (a queue under a mutex for each ordered pair); the meaning the others are tested by.
class ThreadExchange final : public Exchange {
 public:
  ThreadExchange(std::shared_ptr<ThreadHub> hub, int rank);
  ~ThreadExchange() override;

  int rank() const override { return rank_; }
  int size() const override;
  uint64_t start(std::vector<Send> sends, std::vector<Receive> receives) override;
  void finish(uint64_t ticket) override;
  void abort(const std::string& why);

 private:
  struct State;

  void complete(uint64_t ticket, Receive& receive);

  std::shared_ptr<ThreadHub> hub_;
  int rank_;
  std::unique_ptr<State> state_;
};

}  // namespace torchtp::exchange
