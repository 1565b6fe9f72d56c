#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/divider.h"
#include "kernels/halo_planes.h"
#include "kernels/vectors.h"

// How a block brings its tile of 16-bit numbers, with whatever halo it meets, into shared memory as it is, and takes
// its results from there: planes of rows of *chunks*, eight columns of 16 bytes each, whatever the layout in memory and
// wherever a row begins there.
namespace torchtp::kernels {

// A tile in shared memory: [planes][rows][pitch]. An odd number of chunks lies between rows, so that eight of them one
// below the other meet different banks; every eight planes are half of the banks further.
struct BandShape {
  int32_t planes, rows, chunks, pitch;

  static BandShape make(int32_t planes, int32_t rows, int32_t chunks) {
    return {planes, rows, chunks, 8 * (chunks | 1)};
  }
  TORCHTP_HOST_DEVICE int32_t plane(int32_t q) const { return q * rows * pitch + q / 8 * 32; }
  TORCHTP_HOST_DEVICE int32_t numel() const { return plane(planes); }
};

// Eight numbers of 16 bit.
struct alignas(16) Chunk {
  uint32_t words[4];
};

// By one instruction for certain, whatever the compiler makes of copying the numbers.
template <typename Words, typename T>
TORCHTP_HOST_DEVICE Words load_words(const T* from) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Words) == 16) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    return {{four.x, four.y, four.z, four.w}};
  } else {
    return *reinterpret_cast<const Words*>(from);
  }
#else
  Words words;
  memcpy(&words, from, sizeof(words));
  return words;
#endif
}

template <typename Words, typename T>
TORCHTP_HOST_DEVICE void store_words(const Words& words, T* to) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Words) == 16) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words.words[0], words.words[1], words.words[2], words.words[3]);
  } else {
    *reinterpret_cast<Words*>(to) = words;
  }
#else
  memcpy(to, &words, sizeof(words));
#endif
}

template <typename T>
TORCHTP_HOST_DEVICE Chunk load_chunk(const T* from) {
  return load_words<Chunk>(from);
}
template <typename T>
TORCHTP_HOST_DEVICE void store_chunk(const Chunk& chunk, T* to) {
  store_words(chunk, to);
}
template <typename T>
TORCHTP_HOST_DEVICE uint32_t word_at(const T* from) {
  return load_words<uint32_t>(from);
}
template <typename T>
TORCHTP_HOST_DEVICE void set_word(T* to, uint32_t word) {
  store_words(word, to);
}

// Number `i` of a chunk; `i` known to the compiler.
template <typename T>
TORCHTP_HOST_DEVICE void set_number(Chunk& chunk, int i, T value) {
  uint16_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const uint32_t other = chunk.words[i / 2] & (i % 2 ? 0xffffu : 0xffff0000u);
  chunk.words[i / 2] = other | (i % 2 ? uint32_t{bits} << 16 : uint32_t{bits});
}

template <typename T>
TORCHTP_HOST_DEVICE T number(const Chunk& chunk, int i) {
  const auto bits = static_cast<uint16_t>(chunk.words[i / 2] >> (i % 2 * 16));
  T value;
  memcpy(&value, &bits, sizeof(bits));
  return value;
}

// Eight neighbours from any address on, by two loads of 16 bytes; what of them lies outside [begin, end) is void.
template <typename T>
TORCHTP_HOST_DEVICE Chunk load_across(const T* begin, const T* end, int64_t index) {
  const auto ahead = static_cast<int32_t>(reinterpret_cast<uintptr_t>(begin) / sizeof(T) + index) & 7;
  const T* const from = begin + (index - ahead);
  Chunk chunk{};
  if (index < ahead || end - from < 16) {
    // Rare: at the ends of a tensor. In a loop, which keeps the program short.
#pragma unroll 1
    for (int i = 7; i >= 0; --i) {
      uint16_t bits = 0;
      if (index + i >= 0 && begin + index + i < end) memcpy(&bits, begin + index + i, sizeof(bits));
#pragma unroll
      for (int j = 3; j > 0; --j) chunk.words[j] = chunk.words[j] << 16 | chunk.words[j - 1] >> 16;
      chunk.words[0] = chunk.words[0] << 16 | bits;
    }
    return chunk;
  }
  const Chunk first = load_chunk(from);
  if (ahead == 0) return first;
  const Chunk second = load_chunk(from + 8);
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = first.words[i];
    words[4 + i] = second.words[i];
  }
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = ahead & 4 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = ahead & 2 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) chunk.words[i] = ahead & 1 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
  return chunk;
}

// Adds numbers [low, high) of `more` to a chunk that has zeros there.
inline TORCHTP_HOST_DEVICE void merge(Chunk& chunk, const Chunk& more, int32_t low, int32_t high) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t first = 2 * i >= low && 2 * i < high ? 0xffffu : 0;
    const uint32_t second = 2 * i + 1 >= low && 2 * i + 1 < high ? 0xffff0000u : 0;
    chunk.words[i] |= more.words[i] & (first | second);
  }
}

// Channels first: columns [x, x + 8) of row y of a plane; zeros beyond all pieces. kHalos: there may be any but own
// ones.
template <bool kHalos, typename T>
TORCHTP_HOST_DEVICE Chunk chunk_of_row(const HaloPlanes<T>& in, int64_t num_planes, int64_t plane, int32_t y,
                                       int32_t x) {
  const T* piece = in.own;
  int32_t rows = in.height, row = y;
  if (kHalos && y < 0) {
    piece = in.above;
    rows = in.rows_above;
    row = y + rows;
  } else if (kHalos && y >= in.height) {
    piece = in.below;
    rows = in.rows_below;
    row = y - in.height;
  }
  Chunk own{};
  if (row >= 0 && row < rows && x < in.width && x + 8 > 0) {
    own = load_across(piece, piece + num_planes * rows * in.width, (plane * rows + row) * in.width + x);
  }
  if (x >= 0 && x + 8 <= in.width) return own;
  Chunk chunk{};
  merge(chunk, own, -x, in.width - x);
  if (!kHalos) return chunk;
  const int32_t all_rows = in.rows_above + in.height + in.rows_below;
  if (y + in.rows_above < 0 || y + in.rows_above >= all_rows) return chunk;
  const int64_t line = plane * all_rows + y + in.rows_above, lines = num_planes * all_rows;
  if (in.columns_left > 0 && x < 0 && x + 8 > -in.columns_left) {
    merge(chunk, load_across(in.left, in.left + lines * in.columns_left, line * in.columns_left + x + in.columns_left),
          -in.columns_left - x, -x);
  }
  if (in.columns_right > 0 && x + 8 > in.width && x < in.width + in.columns_right) {
    merge(chunk, load_across(in.right, in.right + lines * in.columns_right, line * in.columns_right + x - in.width),
          in.width - x, in.width + in.columns_right - x);
  }
  return chunk;
}

// Planes [first_plane, first_plane + planes) of those below num_planes, from input row y0 and column x0 on.
template <int kThreads, bool kHalos = true, typename T>
TORCHTP_HOST_DEVICE void stage_chunks(const HaloPlanes<T>& in, const BandShape& shape, int64_t first_plane,
                                      int64_t num_planes, int32_t y0, int32_t x0, int thread, T* tile) {
  const int32_t together = kThreads / shape.chunks, column = thread % shape.chunks;
  int32_t row = thread / shape.chunks;
  if (row >= together) return;
  const int32_t x = x0 + 8 * column;
  for (int32_t q = 0; q < shape.planes;) {
    if (row >= shape.rows) {
      row -= shape.rows;
      ++q;
      continue;
    }
    const int64_t plane = first_plane + q;
    const Chunk chunk = plane < num_planes ? chunk_of_row<kHalos>(in, num_planes, plane, y0 + row, x) : Chunk{};
    store_chunk(chunk, tile + shape.plane(q) + row * shape.pitch + 8 * column);
    row += together;
  }
}

// Channels last: channels [c, c + 8) of a pixel; zeros beyond all pieces and channels.
template <bool kHalos, typename T>
TORCHTP_HOST_DEVICE Chunk chunk_of_pixel(const HaloPlanes<T>& in, bool eights, int64_t n, int32_t c, int32_t y,
                                         int32_t x) {
  const T* const pixel = in.template pixel<kHalos>(n, y, x);
  Chunk chunk{};
  if (!pixel || c >= in.channels) return chunk;
  if (eights) return load_chunk(pixel + c);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (c + i < in.channels) set_number(chunk, i, pixel[c + i]);
  }
  return chunk;
}

template <typename T>
bool loads_eights(const HaloPlanes<T>& in) {
  return aligned<T>(in.channels, 8, {in.own, in.above, in.below, in.left, in.right});
}

// Channels [c0, c0 + planes) of batch n, from input row y0 and column x0 on; `eights`: loads_eights.
template <int kThreads, bool kHalos = true, typename T>
TORCHTP_HOST_DEVICE void stage_pixels(const HaloPlanes<T>& in, bool eights, const BandShape& shape, int64_t n,
                                      int32_t c0, int32_t y0, int32_t x0, int thread, T* tile) {
  const int32_t octets = shape.planes / 8, octet = thread % octets;
  const int32_t c = c0 + 8 * octet;
  // Two neighbours at once, in words of both; with the columns between rows, so that a warp writes words side by side.
  for (Walk at(thread / octets, kThreads / octets, shape.pitch / 2); at.row < shape.rows; at.next()) {
    const int32_t y = y0 + at.row, x = x0 + 2 * at.column;
    Chunk left{}, right{};
    if (eights && c < in.channels && y >= 0 && y < in.height && x >= 0 && x + 1 < in.width) {
      const T* const from = in.own + in.template own_index<true>(n, c, y, x);
      left = load_chunk(from);
      right = load_chunk(from + in.channels);
    } else if (2 * at.column < 8 * shape.chunks) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        left = right;
        right = chunk_of_pixel<kHalos>(in, eights, n, c, y, x + i);
      }
    }
    T* const to = tile + shape.plane(8 * octet) + at.row * shape.pitch + 2 * at.column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      set_word(to + shape.rows * shape.pitch * (2 * i), (left.words[i] & 0xffffu) | right.words[i] << 16);
      set_word(to + shape.rows * shape.pitch * (2 * i + 1), left.words[i] >> 16 | (right.words[i] & 0xffff0000u));
    }
  }
}

// What lies in the rows and columns of the tile that belong to `region`, whose row y0 and column x0 are the tile's
// first ones; `eights`: rows of the output begin at 16 bytes.
template <int kThreads, typename T>
TORCHTP_HOST_DEVICE void take_chunks(const BandShape& shape, const T* tile, int64_t first_plane, int64_t num_planes,
                                     int32_t height, int32_t width, int32_t rows, int32_t y0, int32_t x0,
                                     const Region& region, bool eights, int thread, T* out) {
  const int32_t chunks = shape.chunks - 1, together = kThreads / chunks, column = thread % chunks;
  int32_t row = thread / chunks;
  if (row >= together) return;
  const int32_t x = x0 + 8 * column;
  if (x >= region.x1 || x + 8 <= region.x0) return;
  const bool whole = eights && x >= region.x0 && x + 8 <= region.x1;
  for (int32_t q = 0; q < shape.planes && first_plane + q < num_planes;) {
    if (row >= rows) {
      row -= rows;
      ++q;
      continue;
    }
    const int32_t y = y0 + row;
    if (y < region.y1) {
      const Chunk chunk = load_chunk(tile + shape.plane(q) + row * shape.pitch + 8 * column);
      T* const to = out + ((first_plane + q) * height + y) * width + x;
      if (whole) {
        store_chunk(chunk, to);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (x + i >= region.x0 && x + i < region.x1) to[i] = number<T>(chunk, i);
        }
      }
    }
    row += together;
  }
}

// The same, channels last.
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
      const uint32_t even = word_at(from + shape.rows * shape.pitch * (2 * i));
      const uint32_t odd = word_at(from + shape.rows * shape.pitch * (2 * i + 1));
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
