#pragma once

#include "kernels/band_shape.h"
#include "kernels/halo_planes.h"
#include "kernels/vectors.h"

// The same where channels come last (band_rows.h), and back: a block turns 16-bit numbers of a pixel's channels around.
namespace torchtp::kernels {

template <typename T>
bool loads_eights(const HaloPlanes<T>& in) {
  return aligned<T>(in.channels, 8, {in.own, in.above, in.below, in.left, in.right});
}

// Eight channels from c on of a pixel whose channels begin at `pixel`; zeros if that is null, and beyond all channels.
template <bool kEights, typename T>
TORCHTP_HOST_DEVICE Chunk chunk_of_pixel(const T* pixel, int32_t c, int32_t channels) {
  Chunk chunk{};
  if (!pixel || c >= channels) return chunk;
  if constexpr (kEights) {
    chunk = load_chunk(pixel + c);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (c + i < channels) set_number(chunk, i, pixel[c + i]);
    }
  }
  return chunk;
}

// The same of two neighbours; `own`: where the channels of the first own pixel begin.
template <bool kEights, bool kHalos, typename T>
TORCHTP_HOST_DEVICE void load_pair(const HaloPlanes<T>& in, const T* own, int64_t n, int32_t c, int32_t y, int32_t x,
                                   Chunk& left, Chunk& right) {
  const T *first = nullptr, *second = nullptr;
  if (y >= 0 && y < in.height && x >= 0 && x + 1 < in.width) {
    first = own + (int64_t{y} * in.width + x) * in.channels;
    second = first + in.channels;
  } else if ((kHalos && in.has_halo()) || (y >= 0 && y < in.height && x + 1 >= 0 && x < in.width)) {
    first = in.template pixel<kHalos>(n, y, x);
    second = in.template pixel<kHalos>(n, y, x + 1);
  }
  left = chunk_of_pixel<kEights>(first, c, in.channels);
  right = chunk_of_pixel<kEights>(second, c, in.channels);
}

template <int kThreads, int kAhead, bool kEights, bool kHalos, typename T>
TORCHTP_HOST_DEVICE void stage_pairs(const HaloPlanes<T>& in, const BandShape& shape, int64_t n, int32_t c0, int32_t y0,
                                     int32_t x0, int thread, T* tile) {
  const int32_t octets = shape.planes / 8, octet = thread % octets, c = c0 + 8 * octet;
  const T* const own = in.own ? in.own + n * in.height * in.width * in.channels : nullptr;
  T* const plane = tile + shape.plane(8 * octet);
  T* to = plane + thread / octets * 2;
  // Two neighbours at once, in words of both; with the columns between rows, so that a warp writes words side by side.
  for (Walk at(thread / octets, kThreads / octets, shape.pitch / 2); at.row < shape.rows;) {
    Chunk left[kAhead], right[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      left[i] = right[i] = Chunk{};
      if (at.row < shape.rows) {
        load_pair<kEights, kHalos>(in, own, n, c, y0 + at.row, x0 + 2 * at.column, left[i], right[i]);
      }
      at.next();
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i, to += 2 * (kThreads / octets)) {
      if (to >= plane + shape.rows * shape.pitch) break;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t one = left[i].words[k], other = right[i].words[k];
        set_word(to + shape.apart * (2 * k), (one & 0xffffu) | other << 16);
        set_word(to + shape.apart * (2 * k + 1), one >> 16 | (other & 0xffff0000u));
      }
    }
  }
}

// Channels [c0, c0 + planes) of batch n, from input row y0 and column x0 on; `eights`: loads_eights. kAhead: pairs of
// pixels that a thread has under way.
template <int kThreads, int kAhead, bool kHalos = true, typename T>
TORCHTP_HOST_DEVICE void stage_pixels(const HaloPlanes<T>& in, bool eights, const BandShape& shape, int64_t n,
                                      int32_t c0, int32_t y0, int32_t x0, int thread, T* tile) {
  if (eights) {
    stage_pairs<kThreads, kAhead, true, kHalos>(in, shape, n, c0, y0, x0, thread, tile);
  } else {
    stage_pairs<kThreads, 1, false, kHalos>(in, shape, n, c0, y0, x0, thread, tile);
  }
}

// What lies in the rows and columns of the tile that belong to `region`, whose row y0 and column x0 are the tile's
// first ones; `eights`: channels of the output begin at 16 bytes.
template <int kThreads, typename T>
TORCHTP_HOST_DEVICE void take_pixels(const BandShape& shape, const T* tile, int64_t n, int32_t c0, int32_t channels,
                                     int32_t height, int32_t width, int32_t rows, int32_t y0, int32_t x0,
                                     const Region& region, bool eights, int thread, T* out) {
  const int32_t octets = shape.planes / 8, octet = thread % octets, c = c0 + 8 * octet;
  if (c >= channels) return;
  const bool whole = eights && c + 8 <= channels;
  for (Walk at(thread / octets, kThreads / octets, 4 * (shape.chunks - 1)); at.row < rows; at.next()) {
    const int32_t y = y0 + at.row, x = x0 + 2 * at.column;
    if (y >= region.y1 || x >= region.x1 || x + 1 < region.x0) continue;
    const T* const from = tile + shape.plane(8 * octet) + at.row * shape.pitch + 2 * at.column;
    Chunk two[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t even = word_at(from + shape.apart * (2 * i));
      const uint32_t odd = word_at(from + shape.apart * (2 * i + 1));
      two[0].words[i] = (even & 0xffffu) | odd << 16;
      two[1].words[i] = even >> 16 | (odd & 0xffff0000u);
    }
    T* const to = out + ((n * height + y) * width + x) * channels + c;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (x + j < region.x0 || x + j >= region.x1) continue;
      T* const pixel = to + int64_t{j} * channels;
      if (whole) {
        store_chunk(two[j], pixel);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (c + i < channels) pixel[i] = number<T>(two[j], i);
        }
      }
    }
  }
}

}  // namespace torchtp::kernels
