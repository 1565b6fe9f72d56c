#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/engine.h"
#include "backend/host_links.h"
#include "backend/message_watch.h"
#include "collectives/call.h"
#include "collectives/pieces.h"

namespace torchtp::backend {

// Ranks of several hosts: what can be done inside a host goes through the memory its ranks share, and between hosts
// every rank carries its share. Which rank of a host that is follows from places alone: the i-th rank of a host speaks
// with the i-th of the others, modulo their number. Messages of users go by mail between all ranks, also of one host: a
// receive from anybody must find them in one place.
class HostsEngine : public Engine {
 public:
  // hosts[h]: the ranks of host h, ascending. `host` is the group of this rank's host. Connections: `streams` to each
  // rank of the other hosts, `mail` to all.
  HostsEngine(std::vector<std::vector<int>> hosts, int rank, std::shared_ptr<shm::Group> host,
              std::map<int, Fd> streams, std::map<int, Fd> mail, std::shared_ptr<ForkGuard> fork_guard);
  ~HostsEngine() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

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
  void agree(const shm::Fingerprint& fingerprint) override;

  MessagePtr send(const at::Tensor& tensor, int peer, int tag) override;
  MessagePtr recv(const at::Tensor& tensor, int peer, int tag) override;
  MessagePtr recv_any(const at::Tensor& tensor, int tag) override;

  std::shared_ptr<exchange::Exchange> make_exchange() override;
  std::vector<std::vector<int>> hosts() const override { return hosts_; }
  const std::shared_ptr<shm::Group>& host() const override { return host_; }

  void set_timeout(std::chrono::milliseconds timeout) override;
  void set_call_timeout(std::chrono::milliseconds timeout) override;
  bool aborted() const noexcept override { return host_->aborted(); }
  void check() const override { host_->check(); }
  void abort(const std::string& why) noexcept override;
  void handle_signals(const std::function<std::string()>& where) override;
  void stop(const std::string& error) override;
  // A rank has died if its connections have ended without a word; who has left is not told from who is there.
  shm::Presence presence(int rank) const override;

 private:
  struct Transfer {
    int peer;
    std::byte* data;
    size_t num_bytes;
  };

  using HeapBuffer = std::unique_ptr<std::byte, std::function<void(std::byte*)>>;

  // Where a rank is.
  struct Place {
    int host;
    int index;  // among the ranks of its host
  };

  class Blocks;

  struct Range {  // of elements
    int64_t begin, end;
    int64_t count() const { return end - begin; }
  };
  static Range part_of(int64_t count, int num_parts, int index);

  collectives::Call call(const shm::Fingerprint& print) const { return {*host_, print.sequence, &print}; }
  int num_hosts() const { return static_cast<int>(hosts_.size()); }
  bool is_here(int rank) const { return places_[rank].host == here_.host; }
  // As many as the largest host has ranks, so that every rank of every host has a piece to carry.
  int num_pieces() const { return num_pieces_; }
  // The rank of `host` that speaks for piece `index`.
  int carrier(int host, int index) const { return hosts_[host][index % hosts_[host].size()]; }
  int local_carrier(int index) const { return index % static_cast<int>(hosts_[here_.host].size()); }

  // Whole calls, on all ranks of a host the same; where one ends the group, the other hosts hear why.
  void guarded(const std::function<void()>& body);
  // All ranks of all hosts call the same, or all throw. The first ranks of the hosts swap num_bytes at `mine` with it;
  // element h of what they get is host h's.
  std::vector<std::vector<std::byte>> meet(const shm::Fingerprint& print, const std::byte* mine, size_t num_bytes);
  void settle(const shm::Fingerprint& print);  // meet, and know that all the others have
  // Posts both lists, without waiting.
  std::vector<HostLinks::MessagePtr> post(const std::vector<Transfer>& sends, const std::vector<Transfer>& receives);
  void finish(const std::vector<HostLinks::MessagePtr>& messages, const shm::Fingerprint& print);
  std::chrono::milliseconds patience() const;
  Deadline between_hosts() const;
  static size_t most_inline();  // bytes that meet() can take
  void check_message(const at::Tensor& tensor, int peer, int tag, bool receives) const;

  void reduce_all(const shm::Fingerprint& print, std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op);
  void reduce_small(const shm::Fingerprint& print, std::byte* data, int64_t count, at::ScalarType dtype, ReduceOp op);
  void reduce_in_blocks(const shm::Fingerprint& print, std::byte* data, int64_t count, at::ScalarType dtype,
                        ReduceOp op);
  void reduce_scatter_now(const shm::Fingerprint& print, const Inputs& inputs, std::byte* output, int64_t count,
                          at::ScalarType dtype, ReduceOp op);
  void gather_all(const shm::Fingerprint& print, const std::byte* input, const Outputs& outputs, int64_t count,
                  at::ScalarType dtype);
  std::byte* bounce_buffer(size_t num_bytes);  // in the heap; null where that is full
  // [0, count) in num_pieces().
  std::vector<collectives::Piece> cut(std::byte* data, int64_t count, at::ScalarType dtype) const;

  const std::vector<std::vector<int>> hosts_;
  const int rank_;
  const std::vector<Place> places_;  // of each rank
  const int size_;
  const Place here_;
  const int num_pieces_;
  const std::shared_ptr<shm::Group> host_;
  std::atomic<int64_t> timeout_ms_, call_timeout_ms_;
  // Both have threads, so a forked child keeps them as they are, longer than the engine.
  const std::shared_ptr<HostLinks> links_;
  const std::shared_ptr<MessageWatch> watch_;
  // Of even and odd blocks of an allreduce: what arrives from other hosts, or the sums of this host, which are on their
  // way while what arrives is added to them. Kept: memory of this size costs a trap a page whenever it is new.
  std::array<at::Tensor, 2> between_;
  HeapBuffer bounce_{nullptr, [](std::byte*) {}};
};

}  // namespace torchtp::backend
