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

// What threads read of an image: rows and columns `y` and `x` apart from the first ones on.
template <int kVector, typename T>
struct PixelWindow {
  const HaloPlanes<T>& in;
  bool wide;
  int64_t n;
  int32_t y0, x0, step_y, step_x, c;

  // Whether so many rows and columns are own ones, and channels go by one load.
  TORCHTP_HOST_DEVICE bool plain(int32_t rows, int32_t columns) const {
    return wide && y0 >= 0 && y0 + (rows - 1) * step_y < in.height && x0 >= 0 && x0 + (columns - 1) * step_x < in.width;
  }
  // Zeros beyond all pieces.
  template <bool kPlain, int kCount>
  TORCHTP_HOST_DEVICE void load_row(int32_t row, Kept<Pack<T, kVector>> (&pixels)[kCount]) const {
    const int32_t y = y0 + row * step_y;
    if constexpr (kPlain) {
      const T* from = in.own + in.template own_index<true>(n, c, y, x0);
      const int64_t apart = int64_t{step_x} * in.channels;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        pixels[i] = load_pack(reinterpret_cast<const Pack<T, kVector>*>(from + i * apart));
      }
    } else {
      const HaloRow<T> pieces(in, n, y, in.channels);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const T* const pixel = pieces.at(in, x0 + i * step_x);
        pixels[i] = pixel ? load_channels<kVector>(pixel, c, in.channels, wide) : Pack<T, kVector>{};
      }
    }
  }
};

template <typename T>
bool loads_packs(const HaloPlanes<T>& in, int64_t count) {
  return aligned<T>(in.channels, count, {in.own, in.above, in.below, in.left, in.right});
}

}  // namespace torchtp::kernels
