#pragma once

#include <chrono>
#include <map>
#include <mutex>

#include "exchange/arena_layout.h"
#include "exchange/device_exchange.h"
#include "exchange/halo_device.h"
#include "exchange/message_parts.h"
#include "shm/bootstrap.h"

namespace torchtp::exchange {

// Memory of every rank that every other one can write, of one size: peers' as this rank sees it.
struct ArenaMemory {
  std::vector<std::byte*> bases;
  size_t num_bytes;
  kernels::HaloFault* fault;  // memory that the host reads at any time; zero
  std::shared_ptr<const void> owner;
};

// Exchange by writing into the peers' memory. A message is packed by its sender where its receiver looks for it; a word
// says that it is there, another one that its place is free again. Nothing passes the host, so that a graph may capture
// it.
class ArenaExchange final : public DeviceExchange {
 public:
  // Collective. `timeout` bounds every wait of a kernel.
  ArenaExchange(std::shared_ptr<HaloDevice> device, ArenaMemory memory, shm::Bootstrap& bootstrap,
                std::chrono::milliseconds timeout, std::string name);
  ~ArenaExchange() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(memory_.bases.size()); }
  uint64_t start(std::vector<DeviceSend> sends, std::vector<DeviceReceive> receives, Stream stream) override;
  std::vector<const std::byte*> finish(uint64_t ticket, Stream stream) override;
  void release(uint64_t ticket, Stream stream) override;
  int64_t largest_left() const override;
  void check() override;
  std::string name() const override { return name_; }
  size_t memory_bytes() const override { return memory_.num_bytes; }

 private:
  // All messages of an exchange from this rank to a peer, or from it.
  struct Flow {
    int peer;
    std::vector<size_t> messages;  // indices of sends or receives
    MessageChunks parts;
    std::vector<int> slots;  // of the chunks
    bool stays = false;      // is read where it arrives
  };
  struct Exchanging;

  std::vector<Flow> flows_of(const std::vector<std::pair<int, int64_t>>& messages, std::vector<int>& turns);
  void push(Exchanging& exchanging, size_t chunk, Stream stream);
  void wait(const Exchanging& exchanging, size_t chunk, Stream stream);
  void take(Exchanging& exchanging, size_t chunk, Stream stream);
  void complete(Exchanging& exchanging, Stream stream);
  void require_one_graph(const Exchanging& exchanging, Stream stream) const;
  void leave_other_graphs(Stream stream);
  void require_no_trouble();
  uint64_t* word(int owner, int peer, int slot, ArenaLayout::Word word) const;
  std::byte* slot(int owner, int peer, int slot) const;

  const std::shared_ptr<HaloDevice> device_;
  const ArenaMemory memory_;
  const int rank_;
  const std::string name_;
  const std::chrono::milliseconds timeout_;
  const ArenaLayout layout_;
  kernels::HaloContext context_{};

  std::mutex mutex_;
  uint64_t last_ticket_ = 0;
  std::map<uint64_t, std::shared_ptr<Exchanging>> under_way_;
  std::vector<int> out_turns_, in_turns_;  // [peer * 2 + (0: whole messages, 1: parts)]: slots used so far, modulo 2
  std::string cause_;
};

}  // namespace torchtp::exchange
