#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "shm/layout.h"

// How the ranks of a group speak through the first words of their segment: what is written and read, and in what order.
// Written once for two worlds: Processes, and that of tests/cpp/protocol_test.cpp, which goes through every order in
// which three ranks can come to these words.
namespace torchtp::shm {

// Wakes whoever sleeps on the bell. What they wait for was stored before, sequentially consistent: either the sleeper
// sees that store after it has said that it sleeps, or we see here that it does. No system call when nobody sleeps.
template <typename World>
void ring(BellOf<World>& bell) noexcept {
  if (bell.sleepers.load() == 0) return;
  bell.rung.fetch_add(1);
  World::wake(bell.rung);
}

// One nap: says that it sleeps, then may be asked to sleep; destruction takes the word back.
template <typename World>
class Nap {
 public:
  explicit Nap(BellOf<World>& bell) : bell_(bell) {
    bell_.sleepers.fetch_add(1);
    rung_ = bell_.rung.load();
  }
  ~Nap() { bell_.sleepers.fetch_sub(1); }
  Nap(const Nap&) = delete;
  Nap& operator=(const Nap&) = delete;
  // Until the bell is rung (also if it was since construction) or the time is over.
  void sleep(std::chrono::nanoseconds at_most) { World::sleep(bell_.rung, rung_, at_most); }

 private:
  BellOf<World>& bell_;
  uint32_t rung_;
};

// By one thread at a time. A word that is written anew carries with it that `changes` was odd before.
template <typename World, size_t kWords>
void write_board(BoardOf<World, kWords>& board, const uint64_t (&words)[kWords]) {
  const uint64_t odd = board.changes.load(std::memory_order_relaxed) | 1;
  board.changes.store(odd);
  for (size_t i = 0; i < kWords; ++i) board.words[i].store(words[i], std::memory_order_release);
  board.changes.store(odd + 1);
}

// False while the board is being written: then `words` may be of several writings.
template <typename World, size_t kWords>
bool read_board(const BoardOf<World, kWords>& board, uint64_t (&words)[kWords]) {
  const uint64_t before = board.changes.load();
  for (size_t i = 0; i < kWords; ++i) words[i] = board.words[i].load(std::memory_order_acquire);
  return before % 2 == 0 && board.changes.load() == before;
}

// What a rank has announced for a round.
struct Announced {
  Fingerprint fingerprint;
  int64_t heap_offset = -1;
  int64_t arrived_ns = 0;
};

// Bit r: rank r.
struct Gone {
  uint64_t left = 0;
  uint64_t dead = 0;
};

// One rank's side. Like Group: one thread for a channel, any thread for the end.
template <typename World>
class Protocol {
 public:
  Protocol(ControlOf<World>& control, int rank, int size) : control_(control), rank_(rank), size_(size) {}

  // Rounds count from 1. Nobody needs what stands in this round's place any more: it was announced two rounds ago, and
  // all have come to the last round.
  void announce(uint64_t round, const Announced& mine) {
    AnnouncementOf<World>& place = control_.ranks[rank_].announcements[round & 1];
    uint64_t words[kFingerprintWords];
    std::memcpy(words, &mine.fingerprint, sizeof(words));
    for (size_t i = 0; i < kFingerprintWords; ++i) place.fingerprint[i].store(words[i], std::memory_order_relaxed);
    place.heap_offset.store(mine.heap_offset, std::memory_order_relaxed);
    place.arrived_ns.store(mine.arrived_ns, std::memory_order_relaxed);
    place.round.store(round);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) ring(bell(peer, Channel::kRound));
    }
  }

  // The round that stands where `round` will.
  uint64_t round_of(int rank, uint64_t round) const {
    return control_.ranks[rank].announcements[round & 1].round.load();
  }
  bool has_arrived(int rank, uint64_t round) const { return round_of(rank, round) == round; }

  // Whole once that rank has arrived, and until this rank announces the next round.
  Announced announced(int rank, uint64_t round) const {
    const AnnouncementOf<World>& place = control_.ranks[rank].announcements[round & 1];
    uint64_t words[kFingerprintWords];
    for (size_t i = 0; i < kFingerprintWords; ++i) words[i] = place.fingerprint[i].load(std::memory_order_relaxed);
    Announced announced;
    std::memcpy(&announced.fingerprint, words, sizeof(words));
    announced.heap_offset = place.heap_offset.load(std::memory_order_relaxed);
    announced.arrived_ns = place.arrived_ns.load(std::memory_order_relaxed);
    return announced;
  }

  // Sleeps on this rank's bell until ready(). `look` is called before each nap and says how long it may be; it throws
  // where it finds that nothing will come.
  template <typename Ready, typename Look>
  void sleep_until(Channel channel, Ready&& ready, Look&& look) {
    for (;;) {
      Nap<World> nap(bell(rank_, channel));
      if (ready()) return;
      nap.sleep(look());
    }
  }

  // Who will do nothing any more, by what `is_dead(rank)` sees. In this order: who leaves says so before its process
  // ends.
  template <typename IsDead>
  Gone gone(IsDead&& is_dead) const {
    Gone gone;
    for (int peer = 0; peer < size_; ++peer) {
      const bool dead = is_dead(peer);
      const uint64_t bit = uint64_t{1} << peer;
      if (control_.ranks[peer].left.load() != 0) {
        gone.left |= bit;
      } else if (dead) {
        gone.dead |= bit;
      }
    }
    return gone;
  }

  // The first cause wins, and wakes everybody.
  void abort(const std::string& why) noexcept {
    uint32_t expected = kRunning;
    if (!control_.abort_state.compare_exchange_strong(expected, kWritingCause)) return;
    control_.cause[why.copy(control_.cause, kCauseBytes - 1)] = 0;
    control_.abort_state.store(kAborted);
    ring_all();
  }
  // After kWritingCause comes kAborted, unless the writer dies over it.
  AbortState abort_state() const noexcept { return static_cast<AbortState>(control_.abort_state.load()); }
  std::string cause() const {  // once it stands there
    return std::string(control_.cause, strnlen(control_.cause, kCauseBytes));
  }

  // Once; `why` is empty where a rank leaves in good order.
  void leave(const std::string& why) noexcept {
    if (control_.ranks[rank_].left.load() != 0) return;
    if (!why.empty()) control_.farewells[rank_][why.copy(control_.farewells[rank_], kFarewellBytes - 1)] = 0;
    control_.ranks[rank_].left.store(1);
    ring_all();
  }
  std::string farewell(int rank) const {  // of one who has left
    return std::string(control_.farewells[rank], strnlen(control_.farewells[rank], kFarewellBytes));
  }

  BellOf<World>& bell(int rank, Channel channel) const { return control_.ranks[rank].bells[static_cast<int>(channel)]; }

 private:
  void ring_all() noexcept {
    for (int peer = 0; peer < size_; ++peer) {
      for (BellOf<World>& bell : control_.ranks[peer].bells) ring(bell);
    }
  }

  ControlOf<World>& control_;
  const int rank_;
  const int size_;
};

}  // namespace torchtp::shm
