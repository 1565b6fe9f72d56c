#pragma once

#include "kernels/block_program.h"
#include "kernels/factors.h"
#include "kernels/layer_norm.h"
#include "kernels/position_tile.h"
#include "kernels/vectors.h"

namespace torchtp::kernels {

// The gradients of a layer norm where channels come first. As many blocks as the device holds at once take tiles one
// after the other; a thread owns up to kOwned channels, whose part of the gradients of weight and bias it keeps in
// registers over all tiles.
template <typename T, int kVector, int kOwned>
struct LayerNormFirstBackward {
  static constexpr int kThreads = kTileThreads, kBlocksPerSm = 3;
  static constexpr int kStepPhases = 5, kPhases = 6;
  static constexpr int team = 32;
  static constexpr bool kCommutes = true;
  using Elements = Pack<T, kVector>;
  struct Sums {
    Vector<kVector> sum, dot;
  };
  struct State {
    Sums partial;
    Vector<kVector> mean, rstd;
    int64_t offset;
    float grad_weight[kOwned], grad_bias[kOwned];
  };

  const T* dy;
  const T* x;
  Factors<T> weight;
  const float* mean;
  const float* rstd;
  T* dx;            // may be null
  float* partials;  // [num_blocks, 2, C]: of weight and bias
  PositionTile tile;
  int apart;
  int64_t blocks;

  static LayerNormFirstBackward make(const T* dy, const T* x, const Factors<T>& weight, const float* mean,
                                     const float* rstd, T* dx, float* partials, const LayerNormParams& params,
                                     size_t most_shared, int multiprocessors, int64_t most_blocks) {
    const auto tile = PositionTile::make(params, sizeof(T), kVector, 2, most_shared, multiprocessors);
    LayerNormFirstBackward program{dy, x, weight, mean, rstd, dx, partials, tile, tile.lanes(), 0};
    const int64_t of_sm =
        static_cast<int64_t>(most_shared + kStaticSharedBytes) / static_cast<int64_t>(program.shared_bytes() + 1024);
    const int64_t at_once = multiprocessors * std::max<int64_t>(1, std::min<int64_t>(of_sm, kBlocksPerSm));
    program.blocks = std::min({tile.tiles(), at_once, most_blocks});
    return program;
  }

  int64_t num_blocks() const { return blocks; }
  size_t shared_bytes() const {
    return 2 * static_cast<size_t>(tile.elements()) * sizeof(T) + (tile.sums(2) + 2 * tile.width) * sizeof(float);
  }
  TORCHTP_HOST_DEVICE int num_steps(int64_t block) const {
    return static_cast<int>((tile.tiles() - block + blocks - 1) / blocks);
  }
  static constexpr bool reduces(int phase) { return phase == 1; }
  static constexpr Meeting meets(int phase) { return reduces(phase) ? Meeting::kNobody : Meeting::kBlock; }
  static TORCHTP_HOST_DEVICE Sums combine(const Sums& low, const Sums& high) {
    return {low.sum + high.sum, low.dot + high.dot};
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    const TileThread at(tile, place.thread);
    T* const xs = static_cast<T*>(shared);
    T* const dys = xs + tile.elements();
    float* const sums = reinterpret_cast<float*>(dys + tile.elements());
    float* const means = sums + tile.sums(2);
    float* const rstds = means + tile.width;
    const int64_t first = (place.block + step * blocks) * tile.width, position = first + at.position;
    const bool there = position < tile.positions;
    if constexpr (kPhase == 0) {
      if (there) state.offset = tile.offset(position);
      bring(at, there, state.offset, xs + at.position, dys + at.position);
      if (place.thread < tile.width) {
        const int64_t own = first + place.thread;
        means[place.thread] = own < tile.positions ? mean[own] : 0;
        rstds[place.thread] = own < tile.positions ? rstd[own] : 0;
      }
      copies_arrived();
    } else if constexpr (kPhase == 1) {
      state.mean = load_numbers<kVector>(means + at.position);
      state.rstd = load_numbers<kVector>(rstds + at.position);
      state.partial = add_over_channels(at, state.mean, state.rstd, xs + at.position, dys + at.position);
    } else if constexpr (kPhase == 2) {
      tile.keep_partial(sums, 0, at, state.partial.sum);
      tile.keep_partial(sums, 1, at, state.partial.dot);
    } else if constexpr (kPhase == 3) {
      // Half of the block for each kind; width is at most 64.
      const int kind = place.thread / (kThreads / 2), own = place.thread % (kThreads / 2);
      if (own < tile.width) {
        tile.keep_total(sums, kind, own, tile.add_up(sums, kind, own) * tile.each);
      }
    } else if constexpr (kPhase == 4) {
      if (dx && there) write(at, state, sums, xs + at.position, dys + at.position);
      add_own_channels(place.thread, state, xs, dys, means, rstds);
    } else {
      float* const out = partials + place.block * 2 * tile.channels;
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        const int c = place.thread + i * kThreads;
        if (c >= tile.channels) return;
        out[c] = state.grad_weight[i];
        out[tile.channels + c] = state.grad_bias[i];
      }
    }
  }

 private:
  // What is not there counts as zero.
  TORCHTP_HOST_DEVICE void bring(const TileThread& at, bool there, int64_t offset, T* xs, T* dys) const {
#pragma unroll 4
    for (int c = at.group; c < tile.channels; c += at.groups) {
      auto* const to = reinterpret_cast<Elements*>(xs + c * tile.width);
      auto* const grads_to = reinterpret_cast<Elements*>(dys + c * tile.width);
      if (there) {
        copy_ahead(to, reinterpret_cast<const Elements*>(x + offset + c * tile.inner));
        copy_ahead(grads_to, reinterpret_cast<const Elements*>(dy + offset + c * tile.inner));
      } else {
        *to = *grads_to = Elements{};
      }
    }
  }

  TORCHTP_HOST_DEVICE Sums add_over_channels(const TileThread& at, const Vector<kVector>& middle,
                                             const Vector<kVector>& factor, const T* xs, const T* dys) const {
    Sums sums{};
    with_factors(weight, [&](const auto* w) {
#pragma unroll 1
      for (int c = at.group; c < tile.channels; c += at.groups) {
        const Vector<kVector> in = widened(load_pack(reinterpret_cast<const Elements*>(xs + c * tile.width)));
        const Vector<kVector> grad = widened(load_pack(reinterpret_cast<const Elements*>(dys + c * tile.width)));
        const float by = static_cast<float>(w[c]);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float g = grad.values[k] * by;
          sums.sum.values[k] += g;
          sums.dot.values[k] += g * layer_norm_normed(in.values[k], middle.values[k], factor.values[k]);
        }
      }
    });
    return sums;
  }

  TORCHTP_HOST_DEVICE void write(const TileThread& at, const State& state, const float* sums, const T* xs,
                                 const T* dys) const {
    const auto sum = tile.template total<kVector>(sums, 0, at), dot = tile.template total<kVector>(sums, 1, at);
    T* const to = dx + state.offset;
    with_factors(weight, [&](const auto* w) {
#pragma unroll 1
      for (int c = at.group; c < tile.channels; c += at.groups) {
        const Vector<kVector> in = widened(load_pack(reinterpret_cast<const Elements*>(xs + c * tile.width)));
        const Vector<kVector> grad = widened(load_pack(reinterpret_cast<const Elements*>(dys + c * tile.width)));
        const float by = static_cast<float>(w[c]);
        Elements out;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float normed = layer_norm_normed(in.values[k], state.mean.values[k], state.rstd.values[k]);
          out.values[k] = static_cast<T>(
              layer_norm_grad(grad.values[k] * by, normed, state.rstd.values[k], sum.values[k], dot.values[k]));
        }
        store_pack(reinterpret_cast<Elements*>(to + c * tile.inner), out);
      }
    });
  }

  // Neighbouring threads begin at other places of their rows, so that they meet different banks.
  TORCHTP_HOST_DEVICE void add_own_channels(int thread, State& state, const T* xs, const T* dys, const float* means,
                                            const float* rstds) const {
    const int lanes = tile.lanes(), turn = thread * tile.width * static_cast<int>(sizeof(T)) / 128;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int c = thread + i * kThreads;
      if (c >= tile.channels) break;
#pragma unroll 1
      for (int lane = 0; lane < lanes; ++lane) {
        const int p = ((lane + turn) & (lanes - 1)) * kVector;
        const Vector<kVector> in = widened(load_pack(reinterpret_cast<const Elements*>(xs + c * tile.width + p)));
        const Vector<kVector> grad = widened(load_pack(reinterpret_cast<const Elements*>(dys + c * tile.width + p)));
        const auto middle = load_numbers<kVector>(means + p), factor = load_numbers<kVector>(rstds + p);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float g = grad.values[k];
          state.grad_weight[i] += g * layer_norm_normed(in.values[k], middle.values[k], factor.values[k]);
          state.grad_bias[i] += g;
        }
      }
    }
  }
};

}  // namespace torchtp::kernels
