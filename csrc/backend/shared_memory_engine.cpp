#include "backend/shared_memory_engine.h"

#include <numeric>
#include <utility>

#include "backend/point_to_point.h"
#include "collectives/allgather.h"
#include "collectives/allreduce.h"
#include "collectives/alltoall.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/gather.h"
#include "collectives/reduce.h"
#include "collectives/reduce_scatter.h"
#include "collectives/scatter.h"
#include "core/fork_guard.h"
#include "exchange/shm_exchange.h"

namespace torchtp::backend {

SharedMemoryEngine::SharedMemoryEngine(std::shared_ptr<shm::Group> group) : group_(std::move(group)) {}

SharedMemoryEngine::~SharedMemoryEngine() {
  if (group_->is_forked()) ForkGuard::leave_as_it_is(std::move(messages_));
}

void SharedMemoryEngine::allreduce(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype,
                                   ReduceOp op) {
  collectives::allreduce(call(sequence), data, count, dtype, op);
}

void SharedMemoryEngine::reduce(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op,
                                int root) {
  collectives::reduce(call(sequence), data, count, dtype, op, root);
}

void SharedMemoryEngine::reduce_scatter(uint64_t sequence, const Inputs& inputs, std::byte* output, int64_t count,
                                        at::ScalarType dtype, ReduceOp op) {
  collectives::reduce_scatter(call(sequence), inputs, output, count, dtype, op);
}

void SharedMemoryEngine::broadcast(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, int root) {
  collectives::broadcast(call(sequence), data, count, dtype, root);
}

void SharedMemoryEngine::allgather(uint64_t sequence, const std::byte* input, const Outputs& outputs, int64_t count,
                                   at::ScalarType dtype) {
  collectives::allgather(call(sequence), input, outputs, count, dtype);
}

void SharedMemoryEngine::gather(uint64_t sequence, const std::byte* input, const Outputs& outputs, int64_t count,
                                at::ScalarType dtype, int root) {
  collectives::gather(call(sequence), input, outputs, count, dtype, root);
}

void SharedMemoryEngine::scatter(uint64_t sequence, const Inputs& inputs, std::byte* output, int64_t count,
                                 at::ScalarType dtype, int root) {
  collectives::scatter(call(sequence), inputs, output, count, dtype, root);
}

void SharedMemoryEngine::alltoall(uint64_t sequence, const Inputs& inputs, const std::vector<size_t>& send_bytes,
                                  const Outputs& outputs, const std::vector<size_t>& receive_bytes,
                                  at::ScalarType dtype) {
  collectives::alltoall(call(sequence), inputs, send_bytes, outputs, receive_bytes, dtype);
}

void SharedMemoryEngine::barrier(uint64_t sequence) { collectives::barrier(call(sequence)); }

void SharedMemoryEngine::monitored_barrier(uint64_t sequence, bool name_all_ranks) {
  collectives::monitored_barrier(call(sequence), name_all_ranks);
}

void SharedMemoryEngine::agree(const shm::Fingerprint& fingerprint) { group_->round(fingerprint); }

PointToPoint& SharedMemoryEngine::messages() {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !stopped_, "torchtp: the process group has been shut down");
  if (!messages_) messages_ = std::make_unique<PointToPoint>(group_);
  return *messages_;
}

Engine::MessagePtr SharedMemoryEngine::send(const at::Tensor& tensor, int peer, int tag) {
  return messages().send(tensor, peer, tag);
}

Engine::MessagePtr SharedMemoryEngine::recv(const at::Tensor& tensor, int peer, int tag) {
  return messages().recv(tensor, peer, tag);
}

Engine::MessagePtr SharedMemoryEngine::recv_any(const at::Tensor& tensor, int tag) {
  return messages().recv_any(tensor, tag);
}

std::shared_ptr<exchange::Exchange> SharedMemoryEngine::make_exchange() {
  return std::make_shared<exchange::ShmExchange>(group_);
}

std::vector<std::vector<int>> SharedMemoryEngine::hosts() const {
  std::vector<int> all(size());
  std::iota(all.begin(), all.end(), 0);
  return {all};
}

void SharedMemoryEngine::set_timeout(std::chrono::milliseconds timeout) { group_->set_timeout(timeout); }
void SharedMemoryEngine::set_call_timeout(std::chrono::milliseconds timeout) { group_->set_round_timeout(timeout); }
bool SharedMemoryEngine::aborted() const noexcept { return group_->aborted(); }
void SharedMemoryEngine::check() const { group_->check(); }
void SharedMemoryEngine::abort(const std::string& why) noexcept { group_->abort(why); }

void SharedMemoryEngine::stop(const std::string& error) {
  std::unique_ptr<PointToPoint> messages;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    messages = std::move(messages_);
  }
  if (messages) messages->stop();
  group_->leave(error);
}

}  // namespace torchtp::backend
