#pragma once

#include "kernels/block_program.h"

namespace torchtp::kernels {

// The second stage of a sum in two: partial [splits, count] to out [count], in the same order on every run.
template <typename T>
struct SplitSum {
  static constexpr int kThreads = 512, kBlocksPerSm = 2;
  static constexpr int kStepPhases = 2, kPhases = 2;
  static constexpr int kColumns = 32;
  static constexpr int team = kThreads, apart = kColumns;
  struct State {
    float partial;
  };

  const float* from;
  T* out;
  int64_t count;
  int64_t splits;

  int64_t num_blocks() const { return (count + kColumns - 1) / kColumns; }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }
  static constexpr bool reduces(int phase) { return phase == 0; }
  static TORCHTP_HOST_DEVICE float combine(float low, float high) { return low + high; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    const int64_t column = place.block * kColumns + place.thread % kColumns;
    if (column >= count) return;
    if constexpr (kPhase == 0) {
      constexpr int kGroups = kThreads / kColumns;
      float sum = 0;
#pragma unroll 8
      for (int64_t split = place.thread / kColumns; split < splits; split += kGroups)
        sum += from[split * count + column];
      state.partial = sum;
    } else if (place.thread < kColumns) {
      out[column] = static_cast<T>(state.partial);
    }
  }
};

}  // namespace torchtp::kernels
