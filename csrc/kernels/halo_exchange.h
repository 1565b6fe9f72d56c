#pragma once

#include "kernels/block_program.h"
#include "kernels/halo_move.h"
#include "kernels/halo_wait.h"

// The three kernels of an exchange over shared memory, and of packing without one.
//
// NOTE [slots]
// Every ordered pair of ranks has a few slots in the receiver's arena, and every slot four counters that only count up:
//   sent, arrived   messages written to it: the sender's own count, and the word in the receiver's arena it releases
//   taken, free     messages read from it: the receiver's own count, and the word in the sender's arena it releases
// Both sides take the slots of a pair in the same order, which the host knows, so addresses are plain numbers; the
// counts live in device memory, so that a captured graph can be replayed. A sender waits until free == sent before it
// writes.
namespace torchtp::kernels {

constexpr int kMostHaloMoves = 8, kMostHaloChannels = 4;

// Reads from a slot are done: released to its sender.
struct HaloFree {
  const uint64_t* taken;
  uint64_t* free;  // in the sender's arena
};

struct HaloFrees {
  uint32_t count = 0;
  HaloFree frees[kMostHaloChannels] = {};

  template <typename Atomics>
  TORCHTP_HOST_DEVICE void release() const {
    for (uint32_t i = 0; i < count; ++i) Atomics::store_release(frees[i].free, *frees[i].taken);
  }
};

// Moves of one launch; a block works for one of them.
struct HaloMoves {
  static constexpr int kThreads = 256;
  static constexpr uint32_t kUnitsPerBlock = 4 * kThreads, kMostBlocks = 128;

  uint32_t count = 0;
  uint32_t first_block[kMostHaloMoves + 1] = {};
  HaloMove moves[kMostHaloMoves] = {};

  bool is_full() const { return count == kMostHaloMoves; }
  void add(const HaloMove& move) {
    const uint32_t blocks = std::min((move.count + kUnitsPerBlock - 1) / kUnitsPerBlock, kMostBlocks);
    if (blocks == 0) return;
    moves[count] = move;
    first_block[count + 1] = first_block[count] + blocks;
    ++count;
  }
  uint32_t num_blocks() const { return first_block[count]; }

  template <typename Run>
  TORCHTP_HOST_DEVICE void run(const Place& place, const Run& run) const {
    const auto block = static_cast<uint32_t>(place.block);
    if (block >= first_block[count]) return;
    uint32_t index = 0;
    while (block >= first_block[index + 1]) ++index;
    const uint32_t blocks = first_block[index + 1] - first_block[index];
    run(moves[index], (block - first_block[index]) * kThreads + place.thread, blocks * kThreads);
  }
};

// Packs slabs into a payload that nobody waits for yet: of a transport that moves it by other means.
struct HaloPack : NoTeams {
  static constexpr int kThreads = HaloMoves::kThreads, kBlocksPerSm = 4, kStepPhases = 1, kPhases = 1;
  using State = NoState;

  HaloMoves moves;
  HaloHeader headers[kMostHaloMoves] = {};
  HaloHeader* header_places[kMostHaloMoves] = {};
  uint32_t num_headers = 0;

  int64_t num_blocks() const { return std::max<int64_t>(moves.num_blocks(), num_headers > 0); }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State&, void*) const {
    moves.run(place, [](const HaloMove& move, uint32_t begin, uint32_t step) { move_units<true>(move, begin, step); });
    if (place.block == 0 && place.thread == 0) {
      for (uint32_t i = 0; i < num_headers; ++i) *header_places[i] = headers[i];
    }
  }
};

// A slot of a peer's arena that is written.
struct HaloOutgoing {
  HaloAwaited awaited;
  uint64_t* sent;
  const uint64_t* free;
  uint64_t* arrived;  // in the peer's arena; null where a later launch writes the rest
};

struct HaloPushParams {
  HaloContext context{};
  HaloPack pack;
  uint32_t num_channels = 0;
  HaloOutgoing channels[kMostHaloChannels] = {};

  int64_t num_blocks() const { return std::max<int64_t>(pack.moves.num_blocks(), 1); }
};

// Packs slabs into the peers' arenas and says so: one launch for both sides of a dim.
template <typename Atomics>
struct HaloPush : NoTeams, HaloPushParams {
  static constexpr int kThreads = HaloMoves::kThreads, kBlocksPerSm = 4, kStepPhases = 0, kPhases = 3;
  using State = NoState;

  uint32_t blocks;

  explicit HaloPush(const HaloPushParams& params)
      : HaloPushParams(params), blocks(static_cast<uint32_t>(params.num_blocks())) {}
  size_t shared_bytes() const { return 16; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 0; }

  TORCHTP_HOST_DEVICE bool is_free(const HaloOutgoing& channel) const {
    return wait_until<Atomics>(context, channel.free, *channel.sent, channel.awaited);
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State&, void* shared) const {
    auto* const may_write = static_cast<uint32_t*>(shared);
    if constexpr (kPhase == 0) {
      if (place.thread != 0) return;
      bool may = true;
      for (uint32_t i = 0; i < num_channels; ++i) may = may && is_free(channels[i]);
      *may_write = may;
    } else if constexpr (kPhase == 1) {
      if (*may_write == 0) return;
      pack.moves.run(place,
                     [](const HaloMove& move, uint32_t begin, uint32_t step) { move_units<true>(move, begin, step); });
    } else {
      if (place.thread != 0 || *may_write == 0) return;
      // The last block to come signals for all: what the others wrote is ordered before by this counter.
      if (Atomics::fetch_add(&context.control->done.value, 1) + 1 != blocks) return;
      Atomics::store_release(&context.control->done.value, 0);
      for (uint32_t i = 0; i < pack.num_headers; ++i) *pack.header_places[i] = pack.headers[i];
      for (uint32_t i = 0; i < num_channels; ++i) {
        if (channels[i].arrived == nullptr) continue;
        const uint64_t epoch = *channels[i].sent + 1;
        *channels[i].sent = epoch;
        Atomics::store_release(channels[i].arrived, epoch);
      }
    }
  }
};

// What must have arrived: a header at the start of every part of a slot.
struct HaloIncoming {
  HaloAwaited awaited;  // num_bytes: of the part's message
  uint64_t* taken;      // null but for the first part of a slot
  const uint64_t* arrived;
  const HaloHeader* header;
  bool stays;       // is read as it is, so it must be in the layout
  uint32_t layout;  // that the reader has in mind
};

struct HaloWaitParams {
  HaloContext context{};
  uint32_t count = 0;
  HaloIncoming incoming[kMostHaloMoves] = {};
};

// Waits apart from all work: one block, so that nothing else is kept from running.
template <typename Atomics>
struct HaloWait : NoTeams, HaloWaitParams {
  static constexpr int kThreads = 32, kBlocksPerSm = 1, kStepPhases = 0, kPhases = 2;
  using State = NoState;

  explicit HaloWait(const HaloWaitParams& params) : HaloWaitParams(params) {}
  int64_t num_blocks() const { return 1; }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 0; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State&, void*) const {
    const auto index = static_cast<uint32_t>(place.thread);
    if constexpr (kPhase == 0) {
      if (index >= count) return;
      const HaloIncoming& part = incoming[index];
      if (part.taken == nullptr) return;
      if (wait_until<Atomics>(context, part.arrived, *part.taken + 1, part.awaited)) *part.taken += 1;
    } else {
      if (index >= count || has_stopped<Atomics>(context)) return;
      check(incoming[index]);
    }
  }

  TORCHTP_HOST_DEVICE void check(const HaloIncoming& part) const {
    const HaloHeader& header = *part.header;
    const bool agrees = header.ticket == part.awaited.ticket && header.num_bytes == part.awaited.num_bytes;
    if (agrees && (!part.stays || header.layout == part.layout)) return;
    HaloFault fault;
    fault.trouble = static_cast<uint32_t>(agrees ? HaloTrouble::kLayout : HaloTrouble::kMismatch);
    fault.rank = context.rank;
    fault.peer = part.awaited.peer;
    fault.ticket = part.awaited.ticket;
    fault.expected_bytes = part.awaited.num_bytes;
    fault.sent_bytes = header.num_bytes;
    fault.sent_ticket = header.ticket;
    stop_all<Atomics>(context, fault);
  }
};

struct HaloTakeParams {
  HaloContext context{};
  HaloMoves moves;
  HaloFrees frees;

  int64_t num_blocks() const { return std::max<int64_t>(moves.num_blocks(), 1); }
};

// Lays what has arrived into tensors, or adds it, and frees the slots. Moves of one launch touch different elements.
// Without a context (of a transport that needs no slots) nobody can have stopped.
template <typename Atomics>
struct HaloTake : NoTeams, HaloTakeParams {
  static constexpr int kThreads = HaloMoves::kThreads, kBlocksPerSm = 4, kStepPhases = 0, kPhases = 2;
  using State = NoState;

  uint32_t blocks;

  explicit HaloTake(const HaloTakeParams& params)
      : HaloTakeParams(params), blocks(static_cast<uint32_t>(params.num_blocks())) {}
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 0; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State&, void*) const {
    if constexpr (kPhase == 0) {
      if (context.control != nullptr && has_stopped<Atomics>(context)) return;
      moves.run(place, [](const HaloMove& move, uint32_t begin, uint32_t step) { take_units(move, begin, step); });
    } else {
      if (place.thread != 0 || frees.count == 0) return;
      if (Atomics::fetch_add(&context.control->done.value, 1) + 1 != blocks) return;
      Atomics::store_release(&context.control->done.value, 0);
      frees.template release<Atomics>();
    }
  }
};

// On the CPU: returns when it is done.
void halo_pack_cpu(const HaloPack& pack);
void halo_push_cpu(const HaloPushParams& params);
void halo_wait_cpu(const HaloWaitParams& params);
void halo_take_cpu(const HaloTakeParams& params);

}  // namespace torchtp::kernels
