#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shm/group.h"

// What lies at the beginning of a segment. Everything that two ranks write often has cache lines of its own (two, since
// the hardware fetches them in pairs).
namespace torchtp::shm {

constexpr size_t kLine = 128;
constexpr size_t kPage = 4096;
constexpr size_t kCauseBytes = 3072;
constexpr size_t kFarewellBytes = 256;
constexpr size_t kToldWaits = 4;                // of one rank, see told_wait.h
constexpr size_t kToldWords = 32 * kToldWaits;  // what it tells of them
constexpr size_t kFingerprintWords = sizeof(Fingerprint) / sizeof(uint64_t);

// Words of the world in which the protocol runs (protocol.h): World::Atomic<T>.

// Rung when something a rank may wait for became true, but only while somebody sleeps.
template <typename World>
struct alignas(kLine) BellOf {
  typename World::template Atomic<uint32_t> rung;
  typename World::template Atomic<uint32_t> sleepers;
};

// What a rank announces for a round: the words are written before `round`, read after it. They are atomic because one
// who waits for a rank may look at what it announced last while it announces anew.
template <typename World>
struct alignas(kLine) AnnouncementOf {
  typename World::template Atomic<uint64_t> round;
  typename World::template Atomic<uint64_t> fingerprint[kFingerprintWords];
  typename World::template Atomic<int64_t> heap_offset;
  typename World::template Atomic<int64_t> arrived_ns;  // core/clock.h
};

template <typename World>
struct alignas(kLine) RankControlOf {
  typename World::template Atomic<uint32_t> left;
  typename World::template Atomic<uint32_t> core;     // where it waited last, counted from 1; a hint (waiting.cpp)
  typename World::template Atomic<uint32_t> threads;  // 1: other threads than its process' first one call as well
  BellOf<World> bells[kNumChannels];
  AnnouncementOf<World> announcements[2];  // rounds alternate
};

enum AbortState : uint32_t { kRunning = 0, kWritingCause = 1, kAborted = 2 };

template <typename World>
struct ControlOf {
  alignas(kLine) typename World::template Atomic<uint32_t> abort_state;
  char cause[kCauseBytes];  // ends with a zero; complete when abort_state is kAborted
  RankControlOf<World> ranks[kMaxRanks];
  // Why a rank left, if not in good order; end with a zero, complete with `left`.
  char farewells[kMaxRanks][kFarewellBytes];
};

// Where a rank tells the others something now and then: one thread writes, anybody reads meanwhile (protocol.h).
template <typename World, size_t kWords>
struct alignas(kLine) BoardOf {
  typename World::template Atomic<uint64_t> changes;  // odd while it is being written
  typename World::template Atomic<uint64_t> words[kWords];
};

// Ranks as processes of one kernel.
struct Processes {
  template <typename T>
  using Atomic = std::atomic<T>;
  static void wake(std::atomic<uint32_t>& word) noexcept;
  // Unless the word has another value; until somebody wakes it, and not for longer.
  static void sleep(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds at_most) noexcept;
};

using Control = ControlOf<Processes>;
using Board = BoardOf<Processes, kToldWords>;

// Positions count bytes since the beginning of time; see NOTE [restart] in ring.h.
struct RingControl {
  alignas(kLine) std::atomic<uint64_t> head;
  std::atomic<uint64_t> restart_from;
  std::atomic<uint64_t> restart_at;
  alignas(kLine) std::atomic<uint64_t> tail;
};

static_assert(sizeof(Fingerprint) % sizeof(uint64_t) == 0 && std::has_unique_object_representations_v<Fingerprint>,
              "a fingerprint travels and is compared as whole words");
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics in shared memory must not need a lock of one process");

}  // namespace torchtp::shm
