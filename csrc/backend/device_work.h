#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>

namespace torchtp::backend {

// A call that an inner backend carries out: its work, with its streams, futures and results, under torchtp's sequence
// number. Where the group has been aborted meanwhile, what wait() throws is the first cause and not its consequence.
class DeviceWork : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Check = std::function<void()>;  // throws the first cause of an abort, if there was one

  DeviceWork(WorkPtr inner, int rank, c10d::OpType op, uint64_t sequence, Check check)
      : Work(rank, op), inner_(std::move(inner)), sequence_(sequence), check_(std::move(check)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  const WorkPtr inner_;
  const uint64_t sequence_;
  const Check check_;
};

}  // namespace torchtp::backend
