#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/message_work.h"
#include "collectives/reduce_op.h"
#include "exchange/exchange.h"
#include "shm/group.h"

namespace torchtp::backend {

// Carries out what the ranks of one process group do with memory of the CPU. Arguments have been checked; `sequence`
// is the call's number in the group's order, the same on all ranks. Collectives are called one at a time, in that
// order. They throw torchtp::Error: the same on every rank where calls do not match, and the first cause of an abort in
// every later call.
class Engine {
 public:
  using ReduceOp = collectives::ReduceOp;
  using MessagePtr = c10::intrusive_ptr<MessageWork>;
  using Inputs = std::vector<const std::byte*>;
  using Outputs = std::vector<std::byte*>;

  virtual ~Engine() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // As the functions of these names in collectives/.
  virtual void allreduce(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op) = 0;
  virtual void reduce(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op,
                      int root) = 0;
  virtual void reduce_scatter(uint64_t sequence, const Inputs& inputs, std::byte* output, int64_t count,
                              at::ScalarType dtype, ReduceOp op) = 0;
  virtual void broadcast(uint64_t sequence, std::byte* data, int64_t count, at::ScalarType dtype, int root) = 0;
  virtual void allgather(uint64_t sequence, const std::byte* input, const Outputs& outputs, int64_t count,
                         at::ScalarType dtype) = 0;
  virtual void gather(uint64_t sequence, const std::byte* input, const Outputs& outputs, int64_t count,
                      at::ScalarType dtype, int root) = 0;
  virtual void scatter(uint64_t sequence, const Inputs& inputs, std::byte* output, int64_t count, at::ScalarType dtype,
                       int root) = 0;
  virtual void alltoall(uint64_t sequence, const Inputs& inputs, const std::vector<size_t>& send_bytes,
                        const Outputs& outputs, const std::vector<size_t>& receive_bytes, at::ScalarType dtype) = 0;
  virtual void barrier(uint64_t sequence) = 0;
  // A barrier whose error names the first rank that did not come, or all of them.
  virtual void monitored_barrier(uint64_t sequence, bool /*name_all_ranks*/) { barrier(sequence); }
  // Moves nothing: all ranks tell what they are about to do, and it must be the same.
  virtual void agree(const shm::Fingerprint& fingerprint) = 0;

  // Whole tensors, checked; at any time, from any thread.
  virtual MessagePtr send(const at::Tensor& tensor, int peer, int tag) = 0;
  virtual MessagePtr recv(const at::Tensor& tensor, int peer, int tag) = 0;
  virtual MessagePtr recv_any(const at::Tensor& tensor, int tag) = 0;

  // What spatial ops move slabs with. Made once a group.
  virtual std::shared_ptr<exchange::Exchange> make_exchange() = 0;

  // The ranks of each host, ascending.
  virtual std::vector<std::vector<int>> hosts() const = 0;

  // The ranks of this host, whose memory tensors may lie in.
  virtual const std::shared_ptr<shm::Group>& host() const = 0;

  // When each rank came to the last collective, in nanoseconds of core/clock.h; nothing where that is not known.
  virtual const std::vector<int64_t>& arrivals() const {
    static const std::vector<int64_t> kUnknown;
    return kUnknown;
  }

  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  // Of the collectives from now on, until one of the two is set again; by the thread that calls them.
  virtual void set_call_timeout(std::chrono::milliseconds timeout) = 0;
  virtual bool aborted() const noexcept = 0;
  virtual shm::Presence presence(int rank) const = 0;       // as far as can be known from here
  virtual void check() const = 0;                           // throws the first cause of an abort
  virtual void abort(const std::string& why) noexcept = 0;  // never blocks; the first cause wins
  // For waits that the floors below do not see: see shm::GroupOptions. `where`: "allreduce #7".
  virtual void handle_signals(const std::function<std::string()>& where) { host()->handle_signals(where); }
  // Unfinished messages fail, and this rank leaves the group, with the `error` by which its program ends, if there is
  // one. Without Python's lock, and not in a forked child.
  virtual void stop(const std::string& error) = 0;
};

// One collective call on one rank.
struct Call {
  Engine& engine;
  uint64_t sequence;
};

}  // namespace torchtp::backend
