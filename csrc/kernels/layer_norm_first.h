#pragma once

#include "kernels/block_program.h"
#include "kernels/factors.h"
#include "kernels/layer_norm.h"
#include "kernels/position_tile.h"
#include "kernels/vectors.h"

// Layer norm where channels come first. A block takes some neighbouring positions with all their channels, which then
// lie in shared memory, so that global memory is read once. kVector positions (16 bytes, or one) go by one load;
// threads that lie `apart` apart share a position's channels.
namespace torchtp::kernels {

template <typename T, int kVector>
struct LayerNormFirst {
  static constexpr int kThreads = kTileThreads, kBlocksPerSm = 4;
  static constexpr int kStepPhases = 7, kPhases = 7;
  static constexpr int team = 32;
  static constexpr bool kCommutes = true;
  using Elements = Pack<T, kVector>;
  struct State {
    Vector<kVector> partial, mean;
    int64_t offset;
  };

  const T* x;
  Factors<T> weight, bias;
  T* y;
  float* mean;
  float* rstd;
  float eps;
  PositionTile tile;
  int apart;

  static LayerNormFirst make(const T* x, const Factors<T>& weight, const Factors<T>& bias, double eps, T* y,
                             float* mean, float* rstd, const LayerNormParams& params, size_t most_shared,
                             int multiprocessors) {
    const auto tile = PositionTile::make(params, sizeof(T), kVector, 1, most_shared, multiprocessors);
    return {x, weight, bias, y, mean, rstd, static_cast<float>(eps), tile, tile.lanes()};
  }

  int64_t num_blocks() const { return tile.tiles(); }
  size_t shared_bytes() const {
    return static_cast<size_t>(tile.elements()) * sizeof(T) + tile.sums(2) * sizeof(float);
  }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }
  static constexpr bool reduces(int phase) { return phase == 0 || phase == 3; }
  static constexpr Meeting meets(int phase) { return reduces(phase) ? Meeting::kNobody : Meeting::kBlock; }
  static TORCHTP_HOST_DEVICE Vector<kVector> combine(const Vector<kVector>& low, const Vector<kVector>& high) {
    return low + high;
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void* shared) const {
    const TileThread at(tile, place.thread);
    const int64_t position = place.block * tile.width + at.position;
    const bool there = position < tile.positions;
    T* const kept = static_cast<T*>(shared) + at.position;
    float* const sums = reinterpret_cast<float*>(static_cast<T*>(shared) + tile.elements());
    constexpr int kSquares = kPhase < 3 ? 0 : 1;  // apart from the sums, which others may still read
    if constexpr (kPhase == 0) {
      state.partial = {};
      if (!there) return;
      state.offset = tile.offset(position);
      state.partial = bring(at, x + state.offset, kept);
    } else if constexpr (kPhase == 3) {
      state.mean = tile.template total<kVector>(sums, 0, at);
      state.partial = {};
      if (there) state.partial = squares(at, state.mean, kept);
    } else if constexpr (kPhase == 1 || kPhase == 4) {
      tile.keep_partial(sums, kSquares, at, state.partial);
    } else if constexpr (kPhase == 2 || kPhase == 5) {
      if (place.thread >= tile.width) return;
      const float average = tile.add_up(sums, kSquares, place.thread) * tile.each;
      const float number = kPhase == 2 ? average : layer_norm_rstd(average, eps);
      tile.keep_total(sums, kSquares, place.thread, number);
      const int64_t own = place.block * tile.width + place.thread;
      if (own < tile.positions) (kPhase == 2 ? mean : rstd)[own] = number;
    } else if (there) {
      write(at, state.mean, tile.template total<kVector>(sums, kSquares, at), kept, y + state.offset);
    }
  }

 private:
  TORCHTP_HOST_DEVICE Vector<kVector> bring(const TileThread& at, const T* from, T* kept) const {
    Vector<kVector> sum{};
#pragma unroll 4
    for (int c = at.group; c < tile.channels; c += at.groups) {
      copy_ahead(reinterpret_cast<Elements*>(kept + c * tile.width),
                 reinterpret_cast<const Elements*>(from + c * tile.inner));
    }
    copies_arrived();
#pragma unroll 4
    for (int c = at.group; c < tile.channels; c += at.groups) {
      sum = sum + widened(load_pack(reinterpret_cast<const Elements*>(kept + c * tile.width)));
    }
    return sum;
  }

  TORCHTP_HOST_DEVICE Vector<kVector> squares(const TileThread& at, const Vector<kVector>& middle,
                                              const T* kept) const {
    Vector<kVector> sum{};
#pragma unroll 4
    for (int c = at.group; c < tile.channels; c += at.groups) {
      const Vector<kVector> in = widened(load_pack(reinterpret_cast<const Elements*>(kept + c * tile.width)));
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float off = in.values[k] - middle.values[k];
        sum.values[k] += off * off;
      }
    }
    return sum;
  }

  TORCHTP_HOST_DEVICE void write(const TileThread& at, const Vector<kVector>& middle, const Vector<kVector>& factor,
                                 const T* kept, T* to) const {
    with_factors(weight, bias, [&](const auto* w, const auto* b) {
#pragma unroll 4
      for (int c = at.group; c < tile.channels; c += at.groups) {
        const Vector<kVector> in = widened(load_pack(reinterpret_cast<const Elements*>(kept + c * tile.width)));
        const float by = static_cast<float>(w[c]), plus = static_cast<float>(b[c]);
        Elements out;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          out.values[k] = static_cast<T>(layer_norm_apply(in.values[k], middle.values[k], factor.values[k], by, plus));
        }
        store_pack(reinterpret_cast<Elements*>(to + c * tile.inner), out);
      }
    });
  }
};

}  // namespace torchtp::kernels
