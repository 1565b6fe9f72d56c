#pragma once

#include "kernels/column_teams.h"

namespace torchtp::kernels {

// The second stage of a sum in two: partial [splits, count] to out [count], in the same order on every run.
template <typename T>
struct SplitSum : ColumnTeams {
  static constexpr int kBlocksPerSm = 4, kStepPhases = 2, kPhases = 2;
  static constexpr int kHeld = 8;  // numbers on their way to a thread at once
  static constexpr bool kCommutes = true;
  struct State {
    float partial;
  };

  const float* from;
  T* out;
  int64_t count;
  int64_t splits;

  SplitSum(const float* from, T* out, int64_t count, int64_t splits)
      : ColumnTeams(splits, kHeld), from(from), out(out), count(count), splits(splits) {}

  int64_t num_blocks() const { return blocks(count); }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }
  static constexpr bool reduces(int phase) { return phase == 0; }
  static constexpr Meeting meets(int) { return Meeting::kNobody; }
  static TORCHTP_HOST_DEVICE float combine(float low, float high) { return low + high; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    const int64_t mine = column(place);
    if (mine >= count) return;
    if constexpr (kPhase == 0) {
      float sum = 0;
#pragma unroll 1
      for (int64_t first = rank(place); first < splits; first += int64_t{kHeld} * ranks()) {
        float values[kHeld];
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const int64_t split = first + i * ranks();
          values[i] = split < splits ? from[split * count + mine] : 0;
        }
#pragma unroll
        for (int i = 0; i < kHeld; ++i) sum += values[i];
      }
      state.partial = sum;
    } else if (rank(place) == 0) {
      out[mine] = static_cast<T>(state.partial);
    }
  }
};

}  // namespace torchtp::kernels
