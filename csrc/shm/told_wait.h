#pragma once

#include <array>
#include <cstdint>

#include "shm/layout.h"

namespace torchtp::shm {

// A wait of a rank that has become long, as it is told to those who miss that rank.
struct ToldWait {
  int64_t since_ns = 0;     // core/clock.h; 0: there is none
  int64_t failed_ns = 0;    // 0: it goes on
  uint64_t for_ranks = 0;   // of the group that it is told in, as far as they are in it
  uint64_t is_blocked = 0;  // the process' first thread waits, or waits for who is in this round: it will not come
                            // elsewhere before those ranks come here
  char call[184] = {};      // "allreduce #7 (...) of group 'tp'"; where it is told in its own group without that
  char missing[40] = {};    // "ranks 2, 3", as they are called in the wait's own group; empty where `call` says it

  bool is_blocking() const { return is_blocked != 0 && failed_ns == 0; }
  bool blocks_for(int rank) const { return is_blocking() && (for_ranks >> rank & 1) != 0; }
};

// The oldest waits of a rank.
using ToldWaits = std::array<ToldWait, kToldWaits>;
static_assert(sizeof(ToldWaits) == kToldWords * sizeof(uint64_t), "it travels as whole words");

}  // namespace torchtp::shm
