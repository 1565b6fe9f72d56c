#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/block_program.h"
#include "kernels/factors.h"
#include "kernels/layer_norm.h"
#include "kernels/vectors.h"

// The neighbouring positions that a block takes where channels come first, and what its threads make of them together.
namespace torchtp::kernels {

constexpr int kTileThreads = 256, kTileWarps = kTileThreads / 32;
constexpr int64_t kNormBeside = 8 * 1024;  // bytes of a block's memory that are not its tile's, at most

// Whether both passes have memory for the narrowest tile: x and dy of each channel, in rows of 32 bytes.
inline bool layer_norm_first_fits(const LayerNormParams& params, size_t most_shared) {
  return 2 * params.channels * 32 + kNormBeside <= static_cast<int64_t>(most_shared);
}

struct TileThread;

struct PositionTile {
  int64_t inner, positions;  // positions of all batches together
  int channels;
  int width, vector;  // positions of a tile and of a load, powers of two
  int log_lanes;      // of width / vector
  float each;         // 1 / channels

  TORCHTP_HOST_DEVICE int lanes() const { return 1 << log_lanes; }
  TORCHTP_HOST_DEVICE int elements() const { return channels * width; }
  TORCHTP_HOST_DEVICE int64_t tiles() const { return (positions + width - 1) / width; }
  TORCHTP_HOST_DEVICE int64_t offset(int64_t position) const {
    if (positions <= UINT32_MAX) {  // a division in 32 bits is five times as fast
      const int64_t batch = static_cast<uint32_t>(position) / static_cast<uint32_t>(inner);
      return batch * (channels - 1) * inner + position;
    }
    return position / inner * (channels - 1) * inner + position;
  }

  // Rows of 128 bytes are read best, of 64 well, of 32 (a sector) still; small tiles let one block compute while others
  // wait for memory, and many keep all of the device at work.
  static PositionTile make(const LayerNormParams& params, int64_t element_bytes, int vector, int64_t copies,
                           size_t most_shared, int multiprocessors) {
    const int64_t most = std::min<int64_t>(copies * 64 * 1024, static_cast<int64_t>(most_shared) - kNormBeside);
    const int64_t widest = std::min<int64_t>(128 / element_bytes, 32 * vector);
    PositionTile tile{params.inner,
                      params.batches * params.inner,
                      static_cast<int>(params.channels),
                      static_cast<int>(widest),
                      vector,
                      0,
                      1.0f / static_cast<float>(params.channels)};
    const auto row = [&] { return tile.width * element_bytes; };
    const auto bytes = [&] { return copies * tile.elements() * element_bytes; };
    while (row() > 64 && (bytes() > copies * 40 * 1024 || tile.tiles() < 8 * multiprocessors)) tile.width /= 2;
    while (row() > 32 && (bytes() > most || tile.tiles() < 4 * multiprocessors)) tile.width /= 2;
    tile.log_lanes = log2_up(tile.width / vector);
    return tile;
  }

  // Numbers of `count` kinds that the warps have for each position, and afterwards the block.
  TORCHTP_HOST_DEVICE int sums(int kinds) const { return kinds * kTileWarps * width; }
  template <int kVector>
  TORCHTP_HOST_DEVICE void keep_partial(float* sums, int kind, const TileThread& at,
                                        const Vector<kVector>& partial) const;
  // What the warps have for a position.
  TORCHTP_HOST_DEVICE float add_up(const float* sums, int kind, int position) const {
    const float* const mine = sums + kind * kTileWarps * width + position;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kTileWarps; ++warp) sum += mine[warp * width];
    return sum;
  }
  TORCHTP_HOST_DEVICE void keep_total(float* sums, int kind, int position, float number) const {
    sums[kind * kTileWarps * width + position] = number;
  }
  template <int kVector>
  TORCHTP_HOST_DEVICE Vector<kVector> total(const float* sums, int kind, const TileThread& at) const;
};

// A thread's place in a tile.
struct TileThread {
  int warp, group, groups;  // channels go to groups in turn
  int position;             // the first one
  bool speaks;              // for its warp

  TORCHTP_HOST_DEVICE TileThread(const PositionTile& tile, int thread) {
    const int lanes = tile.lanes();
    warp = thread / 32;
    group = thread >> tile.log_lanes;
    groups = kTileThreads >> tile.log_lanes;
    position = (thread & (lanes - 1)) * tile.vector;
    speaks = (thread & 31) < lanes;
  }
};

template <int kVector>
TORCHTP_HOST_DEVICE void PositionTile::keep_partial(float* sums, int kind, const TileThread& at,
                                                    const Vector<kVector>& partial) const {
  if (!at.speaks) return;
  float* const mine = sums + (kind * kTileWarps + at.warp) * width + at.position;
  constexpr int kOnce = kVector < 4 ? kVector : 4;
#pragma unroll
  for (int k = 0; k < kVector; k += kOnce) {
    Pack<float, kOnce> some;
#pragma unroll
    for (int i = 0; i < kOnce; ++i) some.values[i] = partial.values[k + i];
    store_pack(reinterpret_cast<Pack<float, kOnce>*>(mine + k), some);
  }
}

template <int kVector>
TORCHTP_HOST_DEVICE Vector<kVector> PositionTile::total(const float* sums, int kind, const TileThread& at) const {
  return load_numbers<kVector>(sums + kind * kTileWarps * width + at.position);
}

}  // namespace torchtp::kernels
