#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/device_group.h"
#include "backend/engine.h"
#include "backend/lifetime.h"
#include "backend/make_engine.h"
#include "backend/record.h"
#include "backend/trace.h"

namespace torchtp::backend {

// The c10d face: checks each call at the door and hands it to the engine that suits the ranks' places, or, on tensors
// of a device, to an inner backend; there all ranks compare what they call too, beside the inner backend's work.
// Synchronous calls run on the caller's thread after the group's queued work, asynchronous ones on one worker, in
// order.
class TorchtpBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout) : c10d::Backend::Options("torchtp", timeout) {}
  };

  // Another group, of the same kind as this one: makes it on a store, as a rank of a size, with a timeout, a name and
  // the global ranks in it. Collective among its ranks; takes Python's lock.
  using MakeGroup = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout,
      const std::string& name, const std::vector<uint64_t>& global_ranks)>;

  // What the groups of a process share; each may be null.
  struct OfProcess {
    std::shared_ptr<Trace> trace;             // gets to know each group's calls
    std::shared_ptr<ForkGuard> fork_guard;    // ... and connections to other hosts
    std::shared_ptr<Lifetime> default_group;  // knows who will not come to a group of some of its ranks
  };

  // Collective over the store; call it without Python's lock. `make_device_group` is asked for the inner backend of a
  // device's tensors.
  TorchtpBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options,
                 DeviceGroup::Make make_device_group, MakeGroup make_group, OfProcess of_process);
  ~TorchtpBackend() override;

  // What spatial ops move slabs with: one for the group, made when first asked for.
  std::shared_ptr<exchange::Exchange> exchange();

  // The ranks of each host, as they were found.
  std::vector<std::vector<int>> hosts() const { return engine_->hosts(); }

  const std::shared_ptr<Lifetime>& lifetime() const { return lifetime_; }

  // For tests on machines without a card: tensors of that device go to the inner backend from now on.
  void set_inner_device(c10::DeviceType type);

  const std::string getBackendName() const override { return "torchtp"; }
  // A copy: ProcessGroup::splitGroup writes the new group's name and timeout into what it gets.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  // A group of some ranks of this one; null on the others.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  // A group with ranks that have not been in this one, on a store that all of them reach.
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options, const int& rank,
                                          const int& size) override;
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  c10d::ErrorType getError() override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  void abort() override;
  void shutdown() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options = {}) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options = {}) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options = {}) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options = {}) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options = {}) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options = {}) override;
#ifdef C10D_BACKEND_HAS_HOOKS  // new in torch 2.15
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options = {}) override;
#endif
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options = {}) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options = {}) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options = {}) override;
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks = false) override;

  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  using Inner = c10d::Backend;

  // A checked call, ready to run.
  struct Plan {
    c10d::OpType op;
    const char* title;
    Tensors outputs;  // what the work's result and future hold
    Tensors inputs;
    shm::Fingerprint print;                           // what ranks compare when an inner backend carries the call out
    std::function<void(const Call&)> body;            // for memory of the CPU
    std::optional<at::Device> device = std::nullopt;  // where there are no tensors to tell it
  };

  // Runs or queues what `make` returns, or has the inner backend do `inner`. When `make` throws, this rank has found a
  // mistake in its arguments: the error leaves at once, and a refusal is queued so that the other ranks fail instead of
  // waiting for this one.
  WorkPtr launch(bool asynchronous, std::chrono::milliseconds timeout, const std::function<Plan()>& make,
                 const std::function<WorkPtr(Inner&)>& inner = {});
  void announce(std::unique_lock<std::mutex>& lock, uint64_t sequence, const shm::Fingerprint& print, uint64_t number,
                std::chrono::milliseconds timeout);
  WorkPtr on_device(Inner& backend, c10d::OpType op, uint64_t sequence, bool asynchronous,
                    const std::function<WorkPtr(Inner&)>& inner);
  struct MessageTo {
    int peer;  // -1: from any
    int tag;
  };
  WorkPtr message(c10d::OpType op, const at::Tensor& tensor, const MessageTo& to,
                  const std::function<Engine::MessagePtr(Engine&)>& on_cpu,
                  const std::function<WorkPtr(Inner&)>& inner);
  // Null where the tensors lie in the CPU's memory.
  DeviceGroup::BackendPtr inner_for(const Plan& plan) const;
  DeviceGroup::BackendPtr inner_for(const at::Device& device) const;
  bool is_announced();
  std::function<void()> task(uint64_t number, std::chrono::milliseconds timeout, std::function<void(const Call&)> body,
                             std::function<void(std::exception_ptr)> complete) const;
  uint64_t record(const Plan& plan, uint64_t sequence, bool asynchronous) const;
  Plan plan_allgather(const char* title, const TensorLists& outputs, const Tensors& inputs) const;
  Plan plan_allgather_base(const char* title, const Tensors& outputs, const Tensors& inputs) const;
  Plan plan_reduce_scatter_base(const char* title, const Tensors& outputs, const Tensors& inputs,
                                const c10d::ReduceOp& op) const;
  Plan plan_allreduce(const char* title, const Tensors& tensors, const c10d::ReduceOp& op) const;
  void check_root(int64_t root, const char* what) const;
  void check_open();
  WorkPtr remember(WorkPtr work);

  const c10::intrusive_ptr<Options> options_;
  const MakeGroup make_group_;
  const MadeEngine made_;
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<DeviceGroup> device_;
  const std::shared_ptr<Recorder> recorder_;
  const std::shared_ptr<Trace> trace_;
  std::mutex mutex_;  // of the members below
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  bool inner_coalescing_ = false;
  bool announced_ = false;  // a call on a device has been made
  std::vector<WorkPtr> coalesced_;
  std::shared_ptr<exchange::Exchange> exchange_;
  const std::shared_ptr<Lifetime> lifetime_;  // the last member: it ends before what its tasks know
};

}  // namespace torchtp::backend
