#pragma once

#include "kernels/band_shape.h"
#include "kernels/halo_planes.h"
#include "kernels/vectors.h"

// How a block brings its tile of 16-bit numbers, with whatever halo it meets, into shared memory where channels come
// first.
namespace torchtp::kernels {

// Whether rows can be brought half a chunk at a time, without passing registers, from columns on that are multiples of
// four.
template <typename T>
bool brings_halves(const HaloPlanes<T>& in) {
  return aligned<T>(in.width, 4, {in.own, in.above, in.below});
}

// Where row y of a plane begins, own columns alone; null beyond own rows and those above and below.
template <bool kHalos, typename T>
TORCHTP_HOST_DEVICE const T* line_of(const HaloPlanes<T>& in, int64_t plane, int32_t y) {
  const T* piece = in.own;
  int32_t rows = in.height;
  if (kHalos && y < 0) {
    piece = in.above;
    rows = in.rows_above;
    y += rows;
  } else if (kHalos && y >= in.height) {
    piece = in.below;
    rows = in.rows_below;
    y -= in.height;
  }
  return y >= 0 && y < rows ? piece + (plane * rows + y) * in.width : nullptr;
}

struct alignas(8) HalfChunk {
  uint32_t words[2];
};

// `from` null: zeros.
template <typename T>
TORCHTP_HOST_DEVICE void bring_half(const T* from, T* to) {
#ifdef __CUDA_ARCH__
  auto* const half = reinterpret_cast<HalfChunk*>(to);
  if (from) {
    copy_ahead(half, reinterpret_cast<const HalfChunk*>(from));
  } else {
    *half = HalfChunk{};
  }
#else
  const HalfChunk zeros{};
  memcpy(to, from ? static_cast<const void*>(from) : &zeros, sizeof(zeros));
#endif
}

// Halves of chunks, counted from the first one of a tile's rows, that hold halo columns: none of them own ones too.
struct EdgeHalves {
  int32_t begin, end, x0;  // of the tile's halves; the first column of half 0

  template <typename T>
  TORCHTP_HOST_DEVICE static EdgeHalves left(const HaloPlanes<T>& in, const BandShape& shape, int32_t x0) {
    const int32_t first = -((in.columns_left + 3) & ~3);
    return clipped(first, 0, shape, x0);
  }
  template <typename T>
  TORCHTP_HOST_DEVICE static EdgeHalves right(const HaloPlanes<T>& in, const BandShape& shape, int32_t x0) {
    return clipped(in.width, in.width + ((in.columns_right + 3) & ~3), shape, x0);
  }
  TORCHTP_HOST_DEVICE bool holds(int32_t half) const { return half >= begin && half < end; }

 private:
  TORCHTP_HOST_DEVICE static EdgeHalves clipped(int32_t from, int32_t to, const BandShape& shape, int32_t x0) {
    const int32_t first = (from - x0) >> 2, last = (to - x0) >> 2;
    return {first > 0 ? first : 0, last < 2 * shape.chunks ? last : 2 * shape.chunks, x0};
  }
};

// Those halves of a side; `origin`: the column of the input that is the first one of `piece`.
template <int kThreads, typename T>
TORCHTP_HOST_DEVICE void stage_edge_halves(const HaloPlanes<T>& in, const T* piece, int32_t columns, int32_t origin,
                                           const EdgeHalves& edge, const BandShape& shape, int64_t first_plane,
                                           int64_t num_planes, int32_t y0, int thread, T* tile) {
  constexpr int kAhead = 2;  // rows that a thread has under way
  const int32_t all_rows = in.rows_above + in.height + in.rows_below, rows = shape.planes * shape.rows;
  for (int32_t half = edge.begin; half < edge.end; ++half) {
    const int32_t first = edge.x0 + 4 * half - origin;  // column of the piece
    for (int32_t row = thread; row < rows; row += kAhead * kThreads) {
      T four[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t q = shape.by_rows.quotient(row + i * kThreads);
        const int32_t y = y0 + row + i * kThreads - q * shape.rows + in.rows_above;
        const bool there = y >= 0 && y < all_rows && q < shape.planes && first_plane + q < num_planes;
        const int64_t at = ((first_plane + q) * all_rows + y) * columns + first;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          four[i][k] = there && first + k >= 0 && first + k < columns ? piece[at + k] : static_cast<T>(0.0f);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int32_t at = row + i * kThreads;
        if (at >= rows) break;
        const int32_t q = shape.by_rows.quotient(at);
        T* const to = tile + shape.plane(q) + (at - q * shape.rows) * shape.pitch + 4 * half;
        uint16_t bits[4];
        memcpy(bits, four[i], sizeof(bits));
        set_word(to, bits[0] | uint32_t{bits[1]} << 16);
        set_word(to + 2, bits[2] | uint32_t{bits[3]} << 16);
      }
    }
  }
}

// Planes [first_plane, first_plane + planes) of those below num_planes, from input row y0 and column x0 on, a multiple
// of four. For brings_halves; there once copies_arrived.
template <int kThreads, bool kHalos = true, typename T>
TORCHTP_HOST_DEVICE void stage_halves(const HaloPlanes<T>& in, const BandShape& shape, int64_t first_plane,
                                      int64_t num_planes, int32_t y0, int32_t x0, int thread, T* tile) {
  const int32_t together = shape.by_halves.quotient(kThreads), first = shape.by_halves.quotient(thread);
  if (first >= together) return;
  const int32_t half = shape.by_halves.rest(thread), x = x0 + 4 * half;
  const bool inside = x >= 0 && x < in.width;
  if (kHalos && !inside) {
    if (EdgeHalves::left(in, shape, x0).holds(half) || EdgeHalves::right(in, shape, x0).holds(half)) return;
  }
  const bool more_rows = kHalos && in.rows_above + in.rows_below > 0;
  int64_t own = (first_plane * in.height + y0 + first) * in.width + x;
  for (int32_t q = 0; q < shape.planes; ++q, own += int64_t{in.height} * in.width) {
    const bool seen = inside && first_plane + q < num_planes;
    T* to = tile + shape.plane(q) + first * shape.pitch + 4 * half;
    int64_t index = own;
#pragma unroll 4
    for (int32_t row = first; row < shape.rows; row += together) {
      const int32_t y = y0 + row;
      const T* from = nullptr;
      if (seen && y >= 0 && y < in.height) {
        from = in.own + index;
      } else if (seen && more_rows) {
        const T* const line = line_of<kHalos>(in, first_plane + q, y);
        if (line) from = line + x;
      }
      bring_half(from, to);
      index += together * in.width;
      to += together * shape.pitch;
    }
  }
}

// The halves that stage_halves leaves out.
template <int kThreads, typename T>
TORCHTP_HOST_DEVICE void stage_edges(const HaloPlanes<T>& in, const BandShape& shape, int64_t first_plane,
                                     int64_t num_planes, int32_t y0, int32_t x0, int thread, T* tile) {
  stage_edge_halves<kThreads>(in, in.left, in.columns_left, -in.columns_left, EdgeHalves::left(in, shape, x0), shape,
                              first_plane, num_planes, y0, thread, tile);
  stage_edge_halves<kThreads>(in, in.right, in.columns_right, in.width, EdgeHalves::right(in, shape, x0), shape,
                              first_plane, num_planes, y0, thread, tile);
}

// Eight neighbours from any address on, by two loads of 16 bytes; what of them lies outside [begin, end) is void.
template <typename T>
TORCHTP_HOST_DEVICE Chunk load_across(const T* begin, const T* end, const T* at) {
  const auto ahead = static_cast<int32_t>(reinterpret_cast<uintptr_t>(at) / sizeof(T)) & 7;
  const auto index = at - begin;
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

// A chunk whose numbers outside [low, high) are zero.
inline TORCHTP_HOST_DEVICE Chunk kept_between(const Chunk& chunk, int32_t low, int32_t high) {
  Chunk kept;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t first = 2 * i >= low && 2 * i < high ? 0xffffu : 0;
    const uint32_t second = 2 * i + 1 >= low && 2 * i + 1 < high ? 0xffff0000u : 0;
    kept.words[i] = chunk.words[i] & (first | second);
  }
  return kept;
}

// The same as stage_halves from any column on and wherever rows begin.
template <int kThreads, bool kHalos = true, typename T>
TORCHTP_HOST_DEVICE void stage_chunks(const HaloPlanes<T>& in, const BandShape& shape, int64_t first_plane,
                                      int64_t num_planes, int32_t y0, int32_t x0, int thread, T* tile) {
  const int32_t together = kThreads / shape.chunks, column = thread % shape.chunks;
  const int32_t first = thread / shape.chunks, x = x0 + 8 * column;
  if (first >= together) return;
  for (int32_t row = first; row < shape.planes * shape.rows; row += together) {
    const int32_t q = shape.by_rows.quotient(row), y = y0 + row - q * shape.rows;
    const int64_t plane = first_plane + q;
    const T* const line = line_of<kHalos>(in, plane, y);
    Chunk chunk{};
    if (line && plane < num_planes && x < in.width && x + 8 > 0) {
      const T* const piece = kHalos && y < 0 ? in.above : kHalos && y >= in.height ? in.below : in.own;
      const int32_t rows = kHalos && y < 0 ? in.rows_above : kHalos && y >= in.height ? in.rows_below : in.height;
      chunk = load_across(piece, piece + num_planes * rows * in.width, line + x);
      if (x < 0 || x + 8 > in.width) chunk = kept_between(chunk, -x, in.width - x);
    }
    store_chunk(chunk, tile + shape.plane(q) + (row - q * shape.rows) * shape.pitch + 8 * column);
  }
}

// Columns [begin, end) of a piece of halo columns, the first of which is column `origin` of the input, into a tile that
// has its rows otherwise.
template <int kThreads, typename T>
TORCHTP_HOST_DEVICE void stage_columns(const HaloPlanes<T>& in, const T* piece, int32_t columns, int32_t origin,
                                       int32_t begin, int32_t end, const BandShape& shape, int64_t first_plane,
                                       int64_t num_planes, int32_t y0, int32_t x0, int thread, T* tile) {
  if (begin >= end) return;
  const int32_t all_rows = in.rows_above + in.height + in.rows_below;
#pragma unroll 2
  for (int32_t row = thread; row < shape.planes * shape.rows; row += kThreads) {
    const int32_t q = shape.by_rows.quotient(row), y = y0 + row - q * shape.rows + in.rows_above;
    if (y < 0 || y >= all_rows || first_plane + q >= num_planes) continue;
    const T* const from = piece + ((first_plane + q) * all_rows + y) * columns + (begin - origin);
    T* const to = tile + shape.plane(q) + (row - q * shape.rows) * shape.pitch + (begin - x0);
    for (int32_t i = 0; i < end - begin; i += 4) {
      T four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j < end - begin) four[j] = from[i + j];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j < end - begin) to[i + j] = four[j];
      }
    }
  }
}

// Halo columns left and right of the own ones, once these are there.
template <int kThreads, typename T>
TORCHTP_HOST_DEVICE void stage_both_columns(const HaloPlanes<T>& in, const BandShape& shape, int64_t first_plane,
                                            int64_t num_planes, int32_t y0, int32_t x0, int thread, T* tile) {
  const int32_t x1 = x0 + 8 * shape.chunks, right = in.width + in.columns_right;
  stage_columns<kThreads>(in, in.left, in.columns_left, -in.columns_left, x0 > -in.columns_left ? x0 : -in.columns_left,
                          x1 < 0 ? x1 : 0, shape, first_plane, num_planes, y0, x0, thread, tile);
  stage_columns<kThreads>(in, in.right, in.columns_right, in.width, x0 > in.width ? x0 : in.width,
                          x1 < right ? x1 : right, shape, first_plane, num_planes, y0, x0, thread, tile);
}

}  // namespace torchtp::kernels
