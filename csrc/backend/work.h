#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/runner.h"

namespace torchtp::backend {

class Engine;

// What a torchtp call returns. Complete when complete() was called; errors arrive at wait() and in the future.
class TorchtpWork : public c10d::Work {
 public:
  TorchtpWork(int rank, c10d::OpType op, const char* title, uint64_t sequence, std::vector<at::Tensor> outputs,
              const std::vector<at::Tensor>& inputs);

  void complete(std::exception_ptr error);

  // Of whose work this is: a wait on the main thread handles the program's signals, which may end the group. `places`:
  // of the runner that does it, if one does.
  void belongs_to(std::weak_ptr<Engine> engine, Runner::Places places = {}) {
    engine_ = std::move(engine);
    places_ = std::move(places);
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 protected:
  // Whoever completes it does so without this thread; `for_rounds`: see shm::FirstThreadWaits.
  bool wait_for_others(std::chrono::milliseconds timeout, bool for_rounds = false);

 private:
  void catch_up();

  const uint64_t sequence_;  // unless callbacks call something before
  std::weak_ptr<Engine> engine_;
  Runner::Places places_;
  const std::vector<at::Tensor> outputs_;
  std::mutex future_mutex_;
  bool done_ = false;
  std::exception_ptr error_;
  Runner::Place place_ = 0;                         // of what the future's callbacks call
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when first asked for: synchronous calls never need it
};

// Several works as one; waits for them in order.
class WorkList : public c10d::Work {
 public:
  WorkList(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// An error of the floors below as PyTorch's users know it: torchtp::Error becomes c10::DistBackendError.
std::exception_ptr as_dist_error(std::exception_ptr error);

std::string message_of(const std::exception_ptr& error);

}  // namespace torchtp::backend
