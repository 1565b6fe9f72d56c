#pragma once

#include "kernels/block_program.h"
#include "kernels/layer_norm.h"
#include "kernels/vectors.h"

// Layer norm where channels come last: `team` neighbouring threads keep the channels of one position in registers,
// kVector of them (16 bytes, or one) by each load.
namespace torchtp::kernels {

constexpr int kNormThreads = 256, kNormHeld = 16;  // threads of a block; channels that a thread holds

inline int layer_norm_team(int64_t channels) {
  const int log = log2_up((channels + kNormHeld - 1) / kNormHeld);
  return 1 << (log < 2 ? 2 : log);
}

// The channels of `thread`: calls f(place in the registers, first channel) for each kVector of them.
template <int kVector, typename F>
TORCHTP_HOST_DEVICE void for_each_held(int thread, int team, int64_t channels, const F& f) {
#pragma unroll
  for (int i = 0; i < kNormHeld / kVector; ++i) {
    const int64_t c = (int64_t{i} * team + thread % team) * kVector;
    if (c < channels) f(i * kVector, c);
  }
}

template <typename T, int kVector>
struct LayerNormLast {
  static constexpr int kThreads = kNormThreads, kBlocksPerSm = 4;
  static constexpr int kStepPhases = 3, kPhases = 3, apart = 1;
  struct State {
    float partial, mean;
    float held[kNormHeld];
  };

  const T* x;
  const float* weight;
  const float* bias;
  T* y;
  float* mean;
  float* rstd;
  float eps;
  int64_t channels, positions;
  int team;

  static LayerNormLast make(const T* x, const float* weight, const float* bias, double eps, T* y, float* mean,
                            float* rstd, const LayerNormParams& params, size_t /*most_shared*/) {
    return {x,
            weight,
            bias,
            y,
            mean,
            rstd,
            static_cast<float>(eps),
            params.channels,
            params.batches * params.inner,
            layer_norm_team(params.channels)};
  }

  int64_t num_blocks() const { return (positions * team + kThreads - 1) / kThreads; }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }
  static constexpr bool reduces(int phase) { return phase < 2; }
  static TORCHTP_HOST_DEVICE float combine(float low, float high) { return low + high; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    using Elements = Pack<T, kVector>;
    const int64_t position = (place.block * kThreads + place.thread) / team;
    if (position >= positions) return;
    const float each = 1.0f / static_cast<float>(channels);
    const auto held = [&](const auto& f) { for_each_held<kVector>(place.thread, team, channels, f); };
    if constexpr (kPhase == 0) {
      held([&](int i, int64_t c) {
        const Elements in = *reinterpret_cast<const Elements*>(x + position * channels + c);
#pragma unroll
        for (int k = 0; k < kVector; ++k) state.held[i + k] = static_cast<float>(in.values[k]);
      });
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kNormHeld; ++i) sum += state.held[i];  // what was not loaded is zero
      state.partial = sum;
    } else if constexpr (kPhase == 1) {
      state.mean = state.partial * each;
      float squares = 0;
      held([&](int i, int64_t) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float off = state.held[i + k] - state.mean;
          squares += off * off;
        }
      });
      state.partial = squares;
    } else {
      const float factor = layer_norm_rstd(state.partial * each, eps);
      if (place.thread % team == 0) {
        mean[position] = state.mean;
        rstd[position] = factor;
      }
      held([&](int i, int64_t c) {
        Elements out;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          out.values[k] = static_cast<T>(layer_norm_apply(state.held[i + k], state.mean, factor,
                                                          weight ? weight[c + k] : 1.0f, bias ? bias[c + k] : 0.0f));
        }
        *reinterpret_cast<Elements*>(y + position * channels + c) = out;
      });
    }
  }
};

// The gradients. A block takes several rows of positions one after the other; its threads keep their channels' part of
// the gradients of weight and bias in registers over all of them.
template <typename T, int kVector>
struct LayerNormLastBackward {
  static constexpr int kThreads = kNormThreads, kBlocksPerSm = 2;
  static constexpr int kStepPhases = 2, kPhases = 4, apart = 1;
  static constexpr int64_t kMostBlocks = 512;
  struct Sums {
    float sum, dot;
  };
  struct State {
    Sums partial;
    float rstd;
    float normed[kNormHeld], weighted[kNormHeld];
    float grad_weight[kNormHeld], grad_bias[kNormHeld];
  };

  const T* dy;
  const T* x;
  const float* weight;
  const float* mean;
  const float* rstd;
  T* dx;            // may be null
  float* partials;  // [num_blocks, 2, C]: of weight and bias
  int64_t channels, positions;
  int team;

  static LayerNormLastBackward make(const T* dy, const T* x, const float* weight, const float* mean, const float* rstd,
                                    T* dx, float* partials, const LayerNormParams& params, size_t /*most_shared*/) {
    return {dy,
            x,
            weight,
            mean,
            rstd,
            dx,
            partials,
            params.channels,
            params.batches * params.inner,
            layer_norm_team(params.channels)};
  }

  TORCHTP_HOST_DEVICE int64_t rows() const { return (positions * team + kThreads - 1) / kThreads; }
  TORCHTP_HOST_DEVICE int64_t num_blocks() const { return rows() < kMostBlocks ? rows() : kMostBlocks; }
  size_t shared_bytes() const { return 2 * sizeof(float) * static_cast<size_t>(kThreads / team * channels); }
  TORCHTP_HOST_DEVICE int64_t first_row(int64_t block) const { return rows() * block / num_blocks(); }
  TORCHTP_HOST_DEVICE int num_steps(int64_t block) const {
    return static_cast<int>(first_row(block + 1) - first_row(block));
  }
  static constexpr bool reduces(int phase) { return phase == 0; }
  static TORCHTP_HOST_DEVICE Sums combine(const Sums& low, const Sums& high) {
    return {low.sum + high.sum, low.dot + high.dot};
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    using Elements = Pack<T, kVector>;
    const int64_t position = ((first_row(place.block) + step) * kThreads + place.thread) / team;
    const auto held = [&](const auto& f) { for_each_held<kVector>(place.thread, team, channels, f); };
    float* const by_team = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      state.partial = {0, 0};
      if (position >= positions) return;
      const float middle = mean[position];
      state.rstd = rstd[position];
      Sums sums{};
      held([&](int i, int64_t c) {
        const Elements in = *reinterpret_cast<const Elements*>(x + position * channels + c);
        const Elements grad = *reinterpret_cast<const Elements*>(dy + position * channels + c);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float g = static_cast<float>(grad.values[k]);
          const float normed = layer_norm_normed(static_cast<float>(in.values[k]), middle, state.rstd);
          const float weighted = g * (weight ? weight[c + k] : 1.0f);
          state.grad_weight[i + k] += g * normed;
          state.grad_bias[i + k] += g;
          state.normed[i + k] = normed;
          state.weighted[i + k] = weighted;
          sums.sum += weighted;
          sums.dot += weighted * normed;
        }
      });
      state.partial = sums;
    } else if constexpr (kPhase == 1) {
      if (!dx || position >= positions) return;
      const float each = 1.0f / static_cast<float>(channels);
      held([&](int i, int64_t c) {
        Elements out;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          out.values[k] = static_cast<T>(layer_norm_grad(state.weighted[i + k], state.normed[i + k], state.rstd,
                                                         state.partial.sum * each, state.partial.dot * each));
        }
        *reinterpret_cast<Elements*>(dx + position * channels + c) = out;
      });
    } else if constexpr (kPhase == 2) {
      float* const mine = by_team + place.thread / team * 2 * channels;
      held([&](int i, int64_t c) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          mine[c + k] = state.grad_weight[i + k];
          mine[channels + c + k] = state.grad_bias[i + k];
        }
      });
    } else {
      for (int64_t i = place.thread; i < 2 * channels; i += kThreads) {
        float sum = 0;
        for (int slot = 0; slot < kThreads / team; ++slot) sum += by_team[slot * 2 * channels + i];
        partials[place.block * 2 * channels + i] = sum;
      }
    }
  }
};

}  // namespace torchtp::kernels
