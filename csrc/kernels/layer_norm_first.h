#pragma once

#include <algorithm>

#include "kernels/block_program.h"
#include "kernels/layer_norm.h"
#include "kernels/vectors.h"

// Layer norm where channels come first. A block takes some neighbouring positions with all their channels, which then
// lie in shared memory, so that global memory is read once. kVector positions (1 or 4) go by one load; threads that lie
// `lanes` apart share a position's channels.
namespace torchtp::kernels {

constexpr int64_t kNormBeside = 1024;  // bytes of a block's memory that are not its tile's, at most

// Whether both passes have memory for the narrowest tile: x and dy of each channel, rows of 32 bytes and 4 elements.
inline bool layer_norm_first_fits(const LayerNormParams& params, int64_t element_bytes, size_t most_shared) {
  return 2 * params.channels * (32 + 4 * element_bytes) + kNormBeside <= static_cast<int64_t>(most_shared);
}

// The positions of a block, and how its threads share them out.
struct PositionTile {
  int64_t channels, inner, positions;  // positions of all batches together
  int32_t width;                       // positions of a tile, a power of two
  int32_t pitch;                       // elements from one channel's to the next one's in shared memory

  TORCHTP_HOST_DEVICE int64_t tiles() const { return (positions + width - 1) / width; }
  TORCHTP_HOST_DEVICE int64_t offset(int64_t position) const {
    return position / inner * channels * inner + position % inner;
  }

  // Rows of 128 bytes, or shorter ones down to a sector of 32 where many channels would keep other blocks away.
  // `padding` elements stand between the rows.
  static PositionTile make(const LayerNormParams& params, int64_t element_bytes, int32_t vector, int64_t copies,
                           int32_t padding, size_t most_shared) {
    const int64_t most = std::min<int64_t>(100 * 1024, static_cast<int64_t>(most_shared) - kNormBeside);
    const auto row = static_cast<int32_t>(128 / element_bytes), widest = 32 * vector;
    PositionTile tile{params.channels, params.inner, params.batches * params.inner, row < widest ? row : widest, 0};
    const auto bytes = [&] { return copies * tile.channels * (tile.width + padding) * element_bytes; };
    while (bytes() > most && tile.width * element_bytes > 32) tile.width /= 2;
    tile.pitch = tile.width + padding;
    return tile;
  }
};

template <typename T, int kVector>
struct LayerNormFirst {
  static constexpr int kThreads = 256, kBlocksPerSm = 3;
  static constexpr int kStepPhases = 3, kPhases = 3;
  static constexpr int team = kThreads;
  struct State {
    Vector<kVector> partial, mean;
  };

  const T* x;
  const float* weight;
  const float* bias;
  T* y;
  float* mean;
  float* rstd;
  float eps;
  PositionTile tile;
  int apart;

  static LayerNormFirst make(const T* x, const float* weight, const float* bias, double eps, T* y, float* mean,
                             float* rstd, const LayerNormParams& params, size_t most_shared) {
    const PositionTile tile = PositionTile::make(params, sizeof(T), kVector, 1, 0, most_shared);
    return {x, weight, bias, y, mean, rstd, static_cast<float>(eps), tile, tile.width / kVector};
  }

  int64_t num_blocks() const { return tile.tiles(); }
  size_t shared_bytes() const { return static_cast<size_t>(tile.channels * tile.pitch) * sizeof(T); }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }
  static constexpr bool reduces(int phase) { return phase < 2; }
  static TORCHTP_HOST_DEVICE Vector<kVector> combine(const Vector<kVector>& low, const Vector<kVector>& high) {
    return low + high;
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void* shared) const {
    using Elements = Pack<T, kVector>;
    constexpr int kBatch = 4;  // loads under way at once
    const int lane = place.thread % apart, group = place.thread / apart, groups = kThreads / apart;
    const int64_t position = place.block * tile.width + lane * kVector;
    if (position >= tile.positions) return;
    const int64_t offset = tile.offset(position);
    T* const kept = static_cast<T*>(shared) + lane * kVector;
    const float each = 1.0f / static_cast<float>(tile.channels);
    if constexpr (kPhase == 0) {
      Vector<kVector> sum{};
      for (int64_t first = group; first < tile.channels; first += kBatch * groups) {
        Elements batch[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int64_t c = first + b * groups;
          if (c < tile.channels) batch[b] = *reinterpret_cast<const Elements*>(x + offset + c * tile.inner);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int64_t c = first + b * groups;
          if (c >= tile.channels) break;
          *reinterpret_cast<Elements*>(kept + c * tile.pitch) = batch[b];
#pragma unroll
          for (int k = 0; k < kVector; ++k) sum.values[k] += static_cast<float>(batch[b].values[k]);
        }
      }
      state.partial = sum;
    } else if constexpr (kPhase == 1) {
      Vector<kVector> squares{};
#pragma unroll
      for (int k = 0; k < kVector; ++k) state.mean.values[k] = state.partial.values[k] * each;
      for (int64_t c = group; c < tile.channels; c += groups) {
        const Elements elements = *reinterpret_cast<const Elements*>(kept + c * tile.pitch);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float off = static_cast<float>(elements.values[k]) - state.mean.values[k];
          squares.values[k] += off * off;
        }
      }
      state.partial = squares;
    } else {
      float factor[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        factor[k] = layer_norm_rstd(state.partial.values[k] * each, eps);
        if (group == 0) {
          mean[position + k] = state.mean.values[k];
          rstd[position + k] = factor[k];
        }
      }
      for (int64_t c = group; c < tile.channels; c += groups) {
        Elements elements = *reinterpret_cast<const Elements*>(kept + c * tile.pitch);
        const float w = weight ? weight[c] : 1.0f, b = bias ? bias[c] : 0.0f;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          elements.values[k] = static_cast<T>(
              layer_norm_apply(static_cast<float>(elements.values[k]), state.mean.values[k], factor[k], w, b));
        }
        *reinterpret_cast<Elements*>(y + offset + c * tile.inner) = elements;
      }
    }
  }
};

// The gradients. Blocks take several tiles one after the other; a thread owns up to kOwned channels, whose part of the
// gradients of weight and bias it keeps in registers over all tiles.
template <typename T, int kVector, int kOwned>
struct LayerNormFirstBackward {
  static constexpr int kThreads = 256, kBlocksPerSm = 2;
  static constexpr int kStepPhases = 2, kPhases = 3;
  static constexpr int team = kThreads;
  static constexpr int64_t kMostBlocks = 512;
  struct Sums {
    Vector<kVector> sum, dot;
  };
  struct State {
    Sums partial;
    Vector<kVector> mean, rstd;
    float grad_weight[kOwned], grad_bias[kOwned];
  };

  const T* dy;
  const T* x;
  const float* weight;
  const float* mean;
  const float* rstd;
  T* dx;            // may be null
  float* partials;  // [num_blocks, 2, C]: of weight and bias
  PositionTile tile;
  int apart;

  static LayerNormFirstBackward make(const T* dy, const T* x, const float* weight, const float* mean, const float* rstd,
                                     T* dx, float* partials, const LayerNormParams& params, size_t most_shared) {
    const PositionTile tile = PositionTile::make(params, sizeof(T), kVector, 2, 4, most_shared);
    return {dy, x, weight, mean, rstd, dx, partials, tile, tile.width / kVector};
  }

  TORCHTP_HOST_DEVICE int64_t num_blocks() const { return tile.tiles() < kMostBlocks ? tile.tiles() : kMostBlocks; }
  TORCHTP_HOST_DEVICE int64_t tile_elements() const { return tile.channels * tile.pitch; }
  size_t shared_bytes() const {
    return 2 * static_cast<size_t>(tile_elements()) * sizeof(T) + 2 * tile.width * sizeof(float);
  }
  TORCHTP_HOST_DEVICE int64_t first_tile(int64_t block) const { return tile.tiles() * block / num_blocks(); }
  TORCHTP_HOST_DEVICE int num_steps(int64_t block) const {
    return static_cast<int>(first_tile(block + 1) - first_tile(block));
  }
  static constexpr bool reduces(int phase) { return phase == 0; }
  static TORCHTP_HOST_DEVICE Sums combine(const Sums& low, const Sums& high) {
    return {low.sum + high.sum, low.dot + high.dot};
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    T* const xs = static_cast<T*>(shared);
    T* const dys = xs + tile_elements();
    float* const means = reinterpret_cast<float*>(dys + tile_elements());
    const int lane = place.thread % apart, group = place.thread / apart;
    const int64_t position = (first_tile(place.block) + step) * tile.width + lane * kVector;
    if constexpr (kPhase == 0) {
      bring(position, lane, group, state, xs + lane * kVector, dys + lane * kVector, means);
    } else if constexpr (kPhase == 1) {
      if (dx && position < tile.positions) write(position, group, state, xs + lane * kVector, dys + lane * kVector);
      add_own_channels(place.thread, state, xs, dys, means);
    } else {
      float* const out = partials + place.block * 2 * tile.channels;
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        const int64_t c = place.thread + i * kThreads;
        if (c >= tile.channels) return;
        out[c] = state.grad_weight[i];
        out[tile.channels + c] = state.grad_bias[i];
      }
    }
  }

 private:
  using Elements = Pack<T, kVector>;

  TORCHTP_HOST_DEVICE void bring(int64_t position, int lane, int group, State& state, T* xs, T* dys,
                                 float* means) const {
    const int groups = kThreads / apart;
    const bool there = position < tile.positions;
    const int64_t offset = there ? tile.offset(position) : 0;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      state.mean.values[k] = there ? mean[position + k] : 0;
      state.rstd.values[k] = there ? rstd[position + k] : 0;
      if (group == 0) {
        means[lane * kVector + k] = state.mean.values[k];
        means[tile.width + lane * kVector + k] = state.rstd.values[k];
      }
    }
    Sums sums{};
    constexpr int kBatch = 2;
    for (int64_t first = group; first < tile.channels; first += kBatch * groups) {
      Elements in[kBatch]{}, grad[kBatch]{};
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t c = first + b * groups;
        if (c >= tile.channels || !there) break;
        in[b] = *reinterpret_cast<const Elements*>(x + offset + c * tile.inner);
        grad[b] = *reinterpret_cast<const Elements*>(dy + offset + c * tile.inner);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t c = first + b * groups;
        if (c >= tile.channels) break;
        *reinterpret_cast<Elements*>(xs + c * tile.pitch) = in[b];
        *reinterpret_cast<Elements*>(dys + c * tile.pitch) = grad[b];
        const float w = weight ? weight[c] : 1.0f;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float g = static_cast<float>(grad[b].values[k]) * w;
          sums.sum.values[k] += g;
          sums.dot.values[k] +=
              g * layer_norm_normed(static_cast<float>(in[b].values[k]), state.mean.values[k], state.rstd.values[k]);
        }
      }
    }
    state.partial = sums;
  }

  TORCHTP_HOST_DEVICE void write(int64_t position, int group, const State& state, const T* xs, const T* dys) const {
    const int64_t offset = tile.offset(position);
    const float each = 1.0f / static_cast<float>(tile.channels);
    for (int64_t c = group; c < tile.channels; c += kThreads / apart) {
      const Elements in = *reinterpret_cast<const Elements*>(xs + c * tile.pitch);
      const Elements grad = *reinterpret_cast<const Elements*>(dys + c * tile.pitch);
      const float w = weight ? weight[c] : 1.0f;
      Elements out;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float normed =
            layer_norm_normed(static_cast<float>(in.values[k]), state.mean.values[k], state.rstd.values[k]);
        out.values[k] =
            static_cast<T>(layer_norm_grad(static_cast<float>(grad.values[k]) * w, normed, state.rstd.values[k],
                                           state.partial.sum.values[k] * each, state.partial.dot.values[k] * each));
      }
      *reinterpret_cast<Elements*>(dx + offset + c * tile.inner) = out;
    }
  }

  TORCHTP_HOST_DEVICE void add_own_channels(int thread, State& state, const T* xs, const T* dys,
                                            const float* means) const {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int64_t c = thread + i * kThreads;
      if (c >= tile.channels) break;
      for (int32_t p = 0; p < tile.width; p += 4) {
        const auto in = *reinterpret_cast<const Pack<T, 4>*>(xs + c * tile.pitch + p);
        const auto grad = *reinterpret_cast<const Pack<T, 4>*>(dys + c * tile.pitch + p);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float g = static_cast<float>(grad.values[k]);
          state.grad_weight[i] +=
              g * layer_norm_normed(static_cast<float>(in.values[k]), means[p + k], means[tile.width + p + k]);
          state.grad_bias[i] += g;
        }
      }
    }
  }
};

}  // namespace torchtp::kernels
