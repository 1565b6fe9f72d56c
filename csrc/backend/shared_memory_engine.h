#pragma once

#include <mutex>

#include "backend/engine.h"
#include "collectives/call.h"

namespace torchtp::backend {

class PointToPoint;

// All ranks on one host: everything goes through the memory they share.
class SharedMemoryEngine : public Engine {
 public:
  explicit SharedMemoryEngine(std::shared_ptr<shm::Group> group);
  ~SharedMemoryEngine() override;

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }

  void allreduce(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op) override;
  void reduce(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op, int root) override;
  void reduce_scatter(uint64_t sequence, const Inputs& inputs, std::byte* output, int64_t count, at::ScalarType dtype,
                      ReduceOp op) override;
  void broadcast(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, int root) override;
  void allgather(uint64_t sequence, const std::byte* input, const Outputs& outputs, int64_t count,
                 at::ScalarType dtype) override;
  void gather(uint64_t sequence, const std::byte* input, const Outputs& outputs, int64_t count, at::ScalarType dtype,
              int root) override;
  void scatter(uint64_t sequence, const Inputs& inputs, std::byte* output, int64_t count, at::ScalarType dtype,
               int root) override;
  void alltoall(uint64_t sequence, const Inputs& inputs, const std::vector<size_t>& send_bytes, const Outputs& outputs,
                const std::vector<size_t>& receive_bytes, at::ScalarType dtype) override;
  void barrier(uint64_t sequence) override;
  void monitored_barrier(uint64_t sequence, bool name_all_ranks) override;
  void agree(const shm::Fingerprint& fingerprint) override;

  MessagePtr send(const at::Tensor& tensor, int peer, int tag) override;
  MessagePtr recv(const at::Tensor& tensor, int peer, int tag) override;
  MessagePtr recv_any(const at::Tensor& tensor, int tag) override;

  std::shared_ptr<exchange::Exchange> make_exchange() override;
  std::vector<std::vector<int>> hosts() const override;
  const std::shared_ptr<shm::Group>& host() const override { return group_; }

  const std::vector<int64_t>& arrivals() const override { return group_->arrivals(); }

  void set_timeout(std::chrono::milliseconds timeout) override;
  void set_call_timeout(std::chrono::milliseconds timeout) override;
  bool aborted() const noexcept override;
  void check() const override;
  void abort(const std::string& why) noexcept override;
  shm::Presence presence(int rank) const override { return group_->presence(rank); }
  void stop(const std::string& error) override;

 private:
  collectives::Call call(uint64_t sequence) const { return {*group_, sequence}; }
  PointToPoint& messages();

  const std::shared_ptr<shm::Group> group_;
  std::mutex mutex_;  // of the members below
  bool stopped_ = false;
  std::unique_ptr<PointToPoint> messages_;  // made when first asked for
};

}  // namespace torchtp::backend
