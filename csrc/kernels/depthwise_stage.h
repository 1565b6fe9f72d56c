#pragma once

#include <cstdint>

#include "kernels/block_program.h"
#include "kernels/divider.h"
#include "kernels/halo_planes.h"
#include "kernels/tile_grid.h"
#include "kernels/vectors.h"

// How a block of a depthwise convolution brings its tile of the input, with whatever halo it meets, into shared memory
// as float. Four neighbours along the innermost dim go by one load where they lie side by side in one piece.
namespace torchtp::kernels {

constexpr int kLanes = 32;  // channels of a block where channels come last: a warp reads neighbours in memory

template <typename T>
bool loads_four(const T* pointer, int64_t innermost) {
  return innermost % 4 == 0 && reinterpret_cast<uintptr_t>(pointer) % (4 * sizeof(T)) == 0;
}

// Of every piece.
template <typename T>
bool loads_four(const HaloPlanes<T>& in, int64_t innermost) {
  return loads_four(in.own, innermost) && loads_four(in.above, innermost) && loads_four(in.below, innermost) &&
         loads_four(in.left, innermost) && loads_four(in.right, innermost);
}

// A row of a planar tile in strands: columns that are `count` apart lie side by side, so that outputs which are that
// many columns apart read neighbours.
struct Strands {
  int32_t count = 1, pitch = 0;
  int32_t over_count = 1 << 16;  // 1 / count in units of 2^-16, rounded up

  // column / count, for the columns of a tile.
  TORCHTP_HOST_DEVICE int32_t along(int32_t column) const { return (column * over_count) >> 16; }
  TORCHTP_HOST_DEVICE int32_t place(int32_t column) const {
    return (column - along(column) * count) * pitch + along(column);
  }
};

// A tile in shared memory: planes of `rows` x `columns`, rows `pitch` apart; or interleaved, [rows][columns][kLanes].
struct StageShape {
  int32_t planes, rows, columns, pitch;
  bool fours;  // loads_four
  Steps steps;
  Strands strands = {};

  TORCHTP_HOST_DEVICE int32_t planar_floats() const { return planes * rows * pitch; }
  TORCHTP_HOST_DEVICE int32_t interleaved_floats() const { return rows * columns * kLanes; }
};

inline TORCHTP_HOST_DEVICE int32_t round_to_fours(int32_t value) { return (value + 3) / 4 * 4; }

inline StageShape stage_shape(int32_t planes, int32_t rows, int32_t columns, int32_t pitch, bool fours,
                              Steps steps = {}) {
  return {planes, rows, columns, pitch, fours, steps};
}

// In strands of `strand_pitch` floats.
inline StageShape stranded_shape(int32_t planes, int32_t rows, int32_t columns, int32_t count, int32_t strand_pitch,
                                 bool fours, Steps steps) {
  StageShape shape = stage_shape(planes, rows, columns, count * strand_pitch, fours, steps);
  shape.strands = {count, strand_pitch, ((1 << 16) + count - 1) / count};
  return shape;
}

// Loads that a thread has under way before it writes what the first of them brought.
constexpr int kAhead = 4;

// A thread's rows, plane after plane.
struct PlaneRows {
  int32_t row, plane = 0;

  explicit TORCHTP_HOST_DEVICE PlaneRows(int32_t first) : row(first) {}
  // Goes on in the next planes where the row has run beyond its own; false behind the last one.
  TORCHTP_HOST_DEVICE bool within(const StageShape& shape) {
    for (; row >= shape.rows && plane < shape.planes; ++plane) row -= shape.rows;
    return plane < shape.planes;
  }
};

// Channels first: planes [first_plane, first_plane + planes) of those below end_plane, from input row y0 and column x0
// on. What is in row `row` and column `column` of plane number q goes to tile[place(q, row, column)], whose parts of
// each are added up. Columns that own rows have, by four, and zeros beyond all pieces; halo columns are left out. A
// four lies in a row or beside it, since rows have whole fours and begin with one.
template <int kThreads, typename T, typename PlaceOf>
TORCHTP_HOST_DEVICE void stage_fours(const HaloPlanes<T>& in, const StageShape& shape, int64_t first_plane,
                                     int64_t end_plane, int32_t y0, int32_t x0, int thread, float* tile,
                                     const PlaceOf& place) {
  const int32_t shift = x0 & 3, row_fours = (shift + shape.columns + 3) / 4;
  // Where there are more fours in a row than threads, each takes several; else several rows are taken at once.
  const int32_t together = row_fours < kThreads ? kThreads / row_fours : 1;
  const int32_t first_row = row_fours < kThreads ? thread / row_fours : 0;
  if (first_row >= together) return;
  for (int32_t four_number = thread - first_row * row_fours; four_number < row_fours; four_number += kThreads) {
    const int32_t first_column = 4 * four_number - shift, x = x0 + first_column;
    const bool own = x >= 0 && x < in.width;
    bool takes[4];
    int32_t places[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int32_t column = first_column + k, across = x + k;
      takes[k] =
          column >= 0 && column < shape.columns && (own || across < in.first_column() || across >= in.end_column());
      places[k] = place(0, 0, column);
    }
    for (PlaneRows at(first_row); at.within(shape);) {
      Pack<T, 4> packs[kAhead];
      PlaneRows from = at;
#pragma unroll
      for (int i = 0; i < kAhead; ++i, at.row += together) {
        packs[i] = {};
        if (!at.within(shape)) continue;
        const int64_t plane = first_plane + at.plane;
        const T* const line = own && plane < end_plane ? in.line(plane, y0 + at.row * shape.steps.y) : nullptr;
        if (line) packs[i] = load_pack(reinterpret_cast<const Pack<T, 4>*>(line + x));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i, from.row += together) {
        if (!from.within(shape)) break;
        float* const to = tile + place(from.plane, from.row, 0);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (takes[k]) to[places[k]] = static_cast<float>(packs[i].values[k]);
        }
      }
    }
  }
}

// The same element by element, of columns that are any steps apart.
template <int kThreads, typename T, typename PlaceOf>
TORCHTP_HOST_DEVICE void stage_each(const HaloPlanes<T>& in, const StageShape& shape, int64_t first_plane,
                                    int64_t end_plane, int32_t y0, int32_t x0, int thread, float* tile,
                                    const PlaceOf& place) {
  const int32_t row_fours = (shape.columns + 3) / 4;
  const int32_t together = row_fours < kThreads ? kThreads / row_fours : 1;
  const int32_t first_row = row_fours < kThreads ? thread / row_fours : 0;
  if (first_row >= together) return;
  for (int32_t four_number = thread - first_row * row_fours; four_number < row_fours; four_number += kThreads) {
    bool own[4], takes[4];
    int32_t across[4], places[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int32_t column = 4 * four_number + k;
      across[k] = x0 + column * shape.steps.x;
      own[k] = column < shape.columns && across[k] >= 0 && across[k] < in.width;
      takes[k] = column < shape.columns && (own[k] || across[k] < in.first_column() || across[k] >= in.end_column());
      places[k] = place(0, 0, column);
    }
    for (PlaneRows at(first_row); at.within(shape);) {
      float values[kAhead][4];
      PlaneRows from = at;
#pragma unroll
      for (int i = 0; i < kAhead; ++i, at.row += together) {
        const bool there = at.within(shape);
        const int64_t plane = first_plane + at.plane;
        const T* const line = there && plane < end_plane ? in.line(plane, y0 + at.row * shape.steps.y) : nullptr;
#pragma unroll
        for (int k = 0; k < 4; ++k) values[i][k] = line && own[k] ? static_cast<float>(line[across[k]]) : 0;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i, from.row += together) {
        if (!from.within(shape)) break;
        float* const to = tile + place(from.plane, from.row, 0);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (takes[k]) to[places[k]] = values[i][k];
        }
      }
    }
  }
}

// The first of columns x0 + i * step that is not below `line`.
inline TORCHTP_HOST_DEVICE int32_t first_from(int32_t line, int32_t x0, int32_t step, int32_t columns) {
  const int32_t number = line <= x0 ? 0 : (line - x0 + step - 1) / step;
  return number < columns ? number : columns;
}

// The halo columns that those leave out: a thread takes those of a row, which lie side by side.
template <int kThreads, typename T, typename PlaceOf>
TORCHTP_HOST_DEVICE void stage_columns(const HaloPlanes<T>& in, const StageShape& shape, int64_t first_plane,
                                       int64_t end_plane, int32_t y0, int32_t x0, int thread, float* tile,
                                       const PlaceOf& place) {
  const int32_t step = shape.steps.x, rows = in.end_row() - in.first_row();
  const auto number = [&](int32_t line) { return first_from(line, x0, step, shape.columns); };
  const int32_t left = number(in.first_column()), left_end = number(0);
  const int32_t right = number(in.width), right_end = number(in.end_column());
  if (left >= left_end && right >= right_end) return;
  for (PlaneRows at(thread); at.within(shape); at.row += kThreads) {
    const int32_t y = y0 + at.row * shape.steps.y - in.first_row();
    const int64_t plane = first_plane + at.plane, line = plane * rows + y;
    const bool there = plane < end_plane && y >= 0 && y < rows;
    for (int32_t column = left; column < left_end; ++column) {
      const T* const from = in.left + line * in.columns_left + x0 + column * step - in.first_column();
      tile[place(at.plane, at.row, column)] = there ? static_cast<float>(*from) : 0;
    }
    for (int32_t column = right; column < right_end; ++column) {
      const T* const from = in.right + line * in.columns_right + x0 + column * step - in.width;
      tile[place(at.plane, at.row, column)] = there ? static_cast<float>(*from) : 0;
    }
  }
}

template <int kThreads, typename T, typename PlaceOf>
TORCHTP_HOST_DEVICE void stage_planes(const HaloPlanes<T>& in, const StageShape& shape, int64_t first_plane,
                                      int64_t end_plane, int32_t y0, int32_t x0, int thread, float* tile,
                                      const PlaceOf& place) {
  if (shape.fours && shape.steps.x == 1) {
    stage_fours<kThreads>(in, shape, first_plane, end_plane, y0, x0, thread, tile, place);
  } else {
    stage_each<kThreads>(in, shape, first_plane, end_plane, y0, x0, thread, tile, place);
  }
  if (in.columns_left + in.columns_right > 0) {
    stage_columns<kThreads>(in, shape, first_plane, end_plane, y0, x0, thread, tile, place);
  }
}

template <bool kInStrands>
struct PlanarPlace {
  const StageShape& shape;

  TORCHTP_HOST_DEVICE int32_t operator()(int32_t q, int32_t row, int32_t column) const {
    return (q * shape.rows + row) * shape.pitch + (kInStrands ? shape.strands.place(column) : column);
  }
};

template <int kThreads, bool kInStrands = false, typename T>
TORCHTP_HOST_DEVICE void stage_planar(const HaloPlanes<T>& in, const StageShape& shape, int64_t first_plane,
                                      int64_t num_planes, int32_t y0, int32_t x0, int thread, float* tile) {
  stage_planes<kThreads>(in, shape, first_plane, num_planes, y0, x0, thread, tile, PlanarPlace<kInStrands>{shape});
}

// [rows][columns][kLanes], a float more from pixel to pixel: neighbours in a row meet different banks.
constexpr int kSpacedLanes = kLanes + 1;

struct SpacedPlace {
  int32_t columns;

  TORCHTP_HOST_DEVICE int32_t operator()(int32_t q, int32_t row, int32_t column) const {
    return (row * columns + column) * kSpacedLanes + q;
  }
};

// Channels first, but interleaved in shared memory: channels from c0 on of batch n.
template <int kThreads, typename T>
TORCHTP_HOST_DEVICE void stage_interleaved_from_first(const HaloPlanes<T>& in, const StageShape& shape, int64_t n,
                                                      int32_t c0, int32_t y0, int32_t x0, int thread, float* tile) {
  const int64_t first = n * in.channels;
  stage_planes<kThreads>(in, shape, first + c0, first + in.channels, y0, x0, thread, tile, SpacedPlace{shape.columns});
}

// Channels last, [rows][columns][kLanes]: channels from c0 on of batch n.
template <int kThreads, typename T>
TORCHTP_HOST_DEVICE void stage_interleaved(const HaloPlanes<T>& in, const StageShape& shape, int64_t n, int32_t c0,
                                           int32_t y0, int32_t x0, int thread, float* tile) {
  constexpr int kFours = kLanes / 4;
  const int32_t q = thread % kFours * 4, c = c0 + q;
  float* to = tile + thread / kFours * kLanes + q;
  for (Walk at(thread / kFours, kThreads / kFours, shape.columns); at.row < shape.rows;) {
    Pack<T, 4> packs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i, at.next()) {
      packs[i] = {};
      if (at.row >= shape.rows) continue;
      const T* const pixel = in.template pixel<true>(n, y0 + at.row * shape.steps.y, x0 + at.column * shape.steps.x);
      if (pixel && shape.fours && c < in.channels) {
        packs[i] = load_pack(reinterpret_cast<const Pack<T, 4>*>(pixel + c));
      } else if (pixel) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (c + k < in.channels) packs[i].values[k] = pixel[c + k];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i, to += kThreads / kFours * kLanes) {
      if (to >= tile + shape.interleaved_floats()) break;
      Pack<float, 4> four;
#pragma unroll
      for (int k = 0; k < 4; ++k) four.values[k] = static_cast<float>(packs[i].values[k]);
      *reinterpret_cast<Pack<float, 4>*>(to) = four;
    }
  }
}

// Channels last, but planar in shared memory: few channels of large tiles.
template <int kThreads, bool kInStrands = false, typename T>
TORCHTP_HOST_DEVICE void stage_planar_from_last(const HaloPlanes<T>& in, const StageShape& shape, int64_t n, int32_t c0,
                                                int32_t y0, int32_t x0, int thread, float* tile) {
  for (int32_t i = thread; i < shape.planes * shape.rows * shape.columns; i += kThreads) {
    const int32_t pixel = i / shape.planes, q = i - pixel * shape.planes;
    const int32_t row = pixel / shape.columns, column = pixel - row * shape.columns;
    const int32_t y = y0 + row * shape.steps.y, x = x0 + column * shape.steps.x;
    const float value = c0 + q < in.channels ? in.template at<true>(n, c0 + q, y, x) : 0;
    tile[(q * shape.rows + row) * shape.pitch + (kInStrands ? shape.strands.place(column) : column)] = value;
  }
}

// A row of kCount values of one thread, from both kinds of tile; kApart: from pixel to pixel of an interleaved one.
template <int kCount, bool kInterleaved, int kApart = kLanes>
TORCHTP_HOST_DEVICE void read_row(const float* from, float (&row)[kCount]) {
  if constexpr (kInterleaved) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) row[i] = from[i * kApart];
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const auto four = *reinterpret_cast<const Pack<float, 4>*>(from + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j < kCount) row[i + j] = four.values[j];
      }
    }
  }
}

}  // namespace torchtp::kernels
