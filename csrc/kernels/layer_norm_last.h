#pragma once

#include <algorithm>

#include "kernels/block_program.h"
#include "kernels/factors.h"
#include "kernels/layer_norm.h"
#include "kernels/vectors.h"

// Layer norm where channels come last: `team` neighbouring threads keep the channels of one position in registers,
// kVector of them (16 bytes, or one) by each load.
namespace torchtp::kernels {

constexpr int kNormThreads = 256;  // of a block

// Threads that share a position's channels, each of them `held`.
inline int layer_norm_team(int64_t channels, int held) {
  return 1 << std::max(2, log2_up((channels + held - 1) / held));
}

// The channels of `thread`: calls f(which pack, first channel) for each kVector of them.
template <int kVector, int kHeld, typename F>
TORCHTP_HOST_DEVICE void for_each_held(int thread, int team, int channels, const F& f) {
#pragma unroll
  for (int i = 0; i < kHeld / kVector; ++i) {
    const int c = (i * team + (thread & (team - 1))) * kVector;
    if (c < channels) f(i, c);
  }
}

// Teams are of one warp, so that warps do not wait for each other; where channels are few they take kRows positions at
// once, whose loads are then under way together and share the factors.
template <typename T, int kVector, int kHeld>
struct LayerNormLast {
  static constexpr int kThreads = kNormThreads, kBlocksPerSm = (kHeld < 64 ? 3 : 2) - (kVector == 1);
  static constexpr int kStepPhases = 3, kPhases = 3, apart = 1;
  static constexpr int kRows = kHeld < 32 ? 2 : 1, kPacks = kHeld / kVector;
  static constexpr int kMostTeam = 32;
  static constexpr bool kCommutes = true;
  using Elements = Pack<T, kVector>;
  struct State {
    Vector<kRows> partial, mean;
    Vector<kVector> held[kRows][kPacks];  // less the mean, once that is known
  };

  const T* x;
  Factors<T> weight, bias;
  T* y;
  float* mean;
  float* rstd;
  float eps, each;  // 1 / channels
  int channels;
  int64_t positions;
  int team, log_team, teams;  // threads of a team, teams of a block

  static LayerNormLast make(const T* x, const Factors<T>& weight, const Factors<T>& bias, double eps, T* y, float* mean,
                            float* rstd, const LayerNormParams& params) {
    const int team = layer_norm_team(params.channels, kHeld);
    return {x,
            weight,
            bias,
            y,
            mean,
            rstd,
            static_cast<float>(eps),
            1.0f / static_cast<float>(params.channels),
            static_cast<int>(params.channels),
            params.batches * params.inner,
            team,
            log2_up(team),
            kThreads / team};
  }

  int64_t num_blocks() const { return (positions + kRows * teams - 1) / (kRows * teams); }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }
  static constexpr bool reduces(int phase) { return phase < 2; }
  static constexpr Meeting meets(int) { return Meeting::kNobody; }
  static TORCHTP_HOST_DEVICE Vector<kRows> combine(const Vector<kRows>& low, const Vector<kRows>& high) {
    return low + high;
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void*) const {
    const int64_t first = place.block * (kRows * teams) + (place.thread >> log_team);
    const auto held = [&](const auto& f) { for_each_held<kVector, kHeld>(place.thread, team, channels, f); };
    if constexpr (kPhase == 0) {
      Kept<Elements> in[kRows][kPacks]{};  // what is not there is zero
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t position = first + r * teams;
        const bool there = position < positions;
        held([&](int i, int c) {
          if (there) in[r][i] = load_pack(reinterpret_cast<const Elements*>(x + position * channels + c));
        });
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        Vector<kVector> sum{};
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          state.held[r][i] = widened<T, kVector>(in[r][i]);
          sum = i == 0 ? state.held[r][i] : sum + state.held[r][i];
        }
        state.partial.values[r] = sum.total();
      }
    } else if constexpr (kPhase == 1) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        state.mean.values[r] = state.partial.values[r] * each;
        Vector<kVector> squares{};
        held([&](int i, int) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            float& off = state.held[r][i].values[k];
            off -= state.mean.values[r];
            squares.values[k] += off * off;
          }
        });
        state.partial.values[r] = squares.total();
      }
    } else {
      float factor[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        factor[r] = layer_norm_rstd(state.partial.values[r] * each, eps);
        const int64_t position = first + r * teams;
        if ((place.thread & (team - 1)) == 0 && position < positions) {
          mean[position] = state.mean.values[r];
          rstd[position] = factor[r];
        }
      }
      with_factors(weight, bias, [&](const auto* weights, const auto* biases) {
        held([&](int i, int c) {
          const auto w = load_numbers<kVector>(weights + c), b = load_numbers<kVector>(biases + c);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            Elements out;
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
              out.values[k] = static_cast<T>(state.held[r][i].values[k] * factor[r] * w.values[k] + b.values[k]);
            }
            const int64_t position = first + r * teams;
            if (position < positions) store_pack(reinterpret_cast<Elements*>(y + position * channels + c), out);
          }
        });
      });
    }
  }
};

// The gradients. As many blocks as the device holds at once take rows of positions one after the other; what the next
// row needs is under way while one is computed. Threads keep their channels' part of the gradients of weight and bias
// in registers over all rows.
template <typename T, int kVector>
struct LayerNormLastBackward {
  static constexpr int kThreads = kNormThreads, kBlocksPerSm = 2;
  static constexpr int kStepPhases = 2, kPhases = 4, apart = 1;
  static constexpr int kHeld = kVector == 1 ? 8 : 2 * kVector, kPacks = kHeld / kVector;
  static constexpr bool kAhead = kVector > 1;  // one by one there are too many registers
  static constexpr bool kCommutes = true;
  using Elements = Pack<T, kVector>;
  struct Sums {
    float sum, dot;
  };
  struct Row {
    Kept<Elements> x[kPacks], dy[kPacks];
    float mean, rstd;
  };
  struct State {
    Sums partial;
    Row row, next;
    Vector<kVector> grad_weight[kPacks], grad_bias[kPacks];
  };

  const T* dy;
  const T* x;
  Factors<T> weight;
  const float* mean;
  const float* rstd;
  T* dx;            // may be null
  float* partials;  // [num_blocks, 2, C]: of weight and bias
  float each;       // 1 / channels
  int channels;
  int64_t positions;
  int team, log_team, teams;  // threads of a team, teams of a block
  int64_t rows, blocks;

  static LayerNormLastBackward make(const T* dy, const T* x, const Factors<T>& weight, const float* mean,
                                    const float* rstd, T* dx, float* partials, const LayerNormParams& params,
                                    int64_t most_blocks) {
    const int team = layer_norm_team(params.channels, kHeld), teams = kThreads / team;
    const int64_t positions = params.batches * params.inner, rows = (positions + teams - 1) / teams;
    const auto channels = static_cast<int>(params.channels);
    const float each = 1.0f / static_cast<float>(channels);
    return {dy,        x,    weight,
            mean,      rstd, dx,
            partials,  each, channels,
            positions, team, log2_up(team),
            teams,     rows, std::min(rows, most_blocks)};
  }

  int64_t num_blocks() const { return blocks; }
  size_t shared_bytes() const { return 2 * sizeof(float) * static_cast<size_t>(teams * channels); }
  TORCHTP_HOST_DEVICE int num_steps(int64_t block) const {
    return static_cast<int>((rows - block + blocks - 1) / blocks);
  }
  static constexpr bool reduces(int phase) { return phase == 0; }
  static constexpr Meeting meets(int phase) { return phase == 2 ? Meeting::kBlock : Meeting::kNobody; }
  static TORCHTP_HOST_DEVICE Sums combine(const Sums& low, const Sums& high) {
    return {low.sum + high.sum, low.dot + high.dot};
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    const int64_t row = place.block + step * blocks, position = row * teams + (place.thread >> log_team);
    const auto held = [&](const auto& f) { for_each_held<kVector, kHeld>(place.thread, team, channels, f); };
    float* const by_team = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      if (step == 0 || !kAhead) state.next = load(position, place.thread);
      state.row = state.next;
      if (kAhead && row + blocks < rows) state.next = load(position + blocks * teams, place.thread);
      Sums sums{};
      if (position < positions) {
        const auto add = [&](int i, const Vector<kVector>& w) {
          const Vector<kVector> in = widened<T, kVector>(state.row.x[i]), grad = widened<T, kVector>(state.row.dy[i]);
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            const float g = grad.values[k], weighted = g * w.values[k];
            const float normed = layer_norm_normed(in.values[k], state.row.mean, state.row.rstd);
            state.grad_weight[i].values[k] += g * normed;
            state.grad_bias[i].values[k] += g;
            sums.sum += weighted;
            sums.dot += weighted * normed;
          }
        };
        with_factors(weight, [&](const auto* weights) {
          held([&](int i, int c) { add(i, load_numbers<kVector>(weights + c)); });
        });
      }
      state.partial = sums;
    } else if constexpr (kPhase == 1) {
      if (!dx || position >= positions) return;
      const float sum = state.partial.sum * each, dot = state.partial.dot * each;
      const auto write = [&](int i, int c, const Vector<kVector>& w) {
        const Vector<kVector> in = widened<T, kVector>(state.row.x[i]), grad = widened<T, kVector>(state.row.dy[i]);
        Elements out;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float normed = layer_norm_normed(in.values[k], state.row.mean, state.row.rstd);
          out.values[k] =
              static_cast<T>(layer_norm_grad(grad.values[k] * w.values[k], normed, state.row.rstd, sum, dot));
        }
        store_pack(reinterpret_cast<Elements*>(dx + position * channels + c), out);
      };
      with_factors(weight, [&](const auto* weights) {
        held([&](int i, int c) { write(i, c, load_numbers<kVector>(weights + c)); });
      });
    } else if constexpr (kPhase == 2) {
      float* const mine = by_team + (place.thread >> log_team) * 2 * channels;
      held([&](int i, int c) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          mine[c + k] = state.grad_weight[i].values[k];
          mine[channels + c + k] = state.grad_bias[i].values[k];
        }
      });
    } else {
      for (int i = place.thread; i < 2 * channels; i += kThreads) {
        float sum = 0;
        for (int slot = 0; slot < teams; ++slot) sum += by_team[slot * 2 * channels + i];
        partials[place.block * 2 * channels + i] = sum;
      }
    }
  }

 private:
  TORCHTP_HOST_DEVICE Row load(int64_t position, int thread) const {
    Row row{};
    if (position >= positions) return row;
    row.mean = mean[position];
    row.rstd = rstd[position];
    const T *const from = x + position * channels, *const grads = dy + position * channels;
    for_each_held<kVector, kHeld>(thread, team, channels, [&](int i, int c) {
      row.x[i] = load_pack(reinterpret_cast<const Elements*>(from + c));
      row.dy[i] = load_pack(reinterpret_cast<const Elements*>(grads + c));
    });
    return row;
  }
};

}  // namespace torchtp::kernels
