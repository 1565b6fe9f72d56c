#pragma once

#include <cstdint>

#include "kernels/block_program.h"
#include "kernels/divider.h"
#include "kernels/halo_planes.h"
#include "kernels/halo_row.h"
#include "kernels/vectors.h"

// Channels last, without shared memory between a window and who reads it: a thread takes kVector neighbouring channels,
// `lanes` of them lie side by side, and what neighbours read as well comes from the cache.
namespace torchtp::kernels {

// How the threads of a block share out channels and tiles: 2^log_lanes threads for the channels of one tile.
template <int kThreads, int kVector>
struct PixelLanes {
  int32_t channels;
  int log_lanes;
  Divider chunks;       // of channels, as a block has lanes
  Divider tile_groups;  // of tiles of an image, as a block has spots

  PixelLanes() = default;
  PixelLanes(int32_t channels, int32_t tiles) : channels(channels), log_lanes(5) {
    // Fewer lanes where many of 32 would have no channel.
    const int32_t packs = (channels + kVector - 1) / kVector;
    const auto idle = [&](int log) { return ((packs + (1 << log) - 1) >> log << log) - packs; };
    for (int log = 4; log >= 3; --log) {
      if (8 * idle(log_lanes) > packs && idle(log) < idle(log_lanes)) log_lanes = log;
    }
    chunks = Divider((packs + (1 << log_lanes) - 1) >> log_lanes);
    tile_groups = Divider((tiles + spots() - 1) / spots());
  }

  TORCHTP_HOST_DEVICE int32_t spots() const { return kThreads >> log_lanes; }
  TORCHTP_HOST_DEVICE int32_t block_channels() const { return kVector << log_lanes; }
  TORCHTP_HOST_DEVICE int32_t spot(int thread) const { return thread >> log_lanes; }
  // Of the chunk's channels the thread's first one.
  TORCHTP_HOST_DEVICE int32_t lane_channel(int thread) const { return (thread & ((1 << log_lanes) - 1)) * kVector; }
};

// The channels [c, c + kVector) of a pixel; zeros beyond all channels. wide: by one load.
template <int kVector, typename T>
TORCHTP_HOST_DEVICE Pack<T, kVector> load_channels(const T* pixel, int32_t c, int32_t channels, bool wide) {
  if (wide) return load_pack(reinterpret_cast<const Pack<T, kVector>*>(pixel + c));
  Pack<T, kVector> pack = {};
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (c + k < channels) pack.values[k] = pixel[c + k];
  }
  return pack;
}

// Pixels x, x + step, ... of row y, zeros beyond all pieces. inside: all of them are own ones.
template <int kVector, int kCount, typename T>
TORCHTP_HOST_DEVICE void load_pixels(const HaloPlanes<T>& in, int64_t n, int32_t y, int32_t x, int32_t step, int32_t c,
                                     bool inside, bool wide, Pack<T, kVector> (&row)[kCount]) {
  if (inside) {
    const T* const first = in.own + in.template own_index<true>(n, 0, y, x);
    const int32_t apart = step * in.channels;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      row[i] = load_channels<kVector>(first + int64_t{i} * apart, c, in.channels, wide);
    }
    return;
  }
  const HaloRow<T> pieces(in, n, y, in.channels);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const T* const pixel = pieces.at(in, x + i * step);
    row[i] = {};
    if (pixel) row[i] = load_channels<kVector>(pixel, c, in.channels, wide);
  }
}

// Rows or columns: `count` of them, `step` apart.
struct Span {
  int32_t first, count, step;
  TORCHTP_HOST_DEVICE bool within(int32_t extent) const { return first >= 0 && first + (count - 1) * step < extent; }
};

template <typename T>
bool loads_packs(const HaloPlanes<T>& in, int64_t count) {
  return aligned<T>(in.channels, count, {in.own, in.above, in.below, in.left, in.right});
}

}  // namespace torchtp::kernels
