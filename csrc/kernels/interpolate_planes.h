#pragma once

#include <cstdint>
#include <type_traits>

#include "core/host_device.h"
#include "kernels/divider.h"
#include "kernels/interpolate_axis.h"
#include "kernels/vectors.h"

// Resampling of two dims at once, for the device: an item is kVector neighbouring elements of a pixel in some planes,
// which share their taps.
namespace torchtp::kernels {

// Items of [planes, rows, columns, inner] arrays of at least kPlanes planes. The last planes are not asked for whether
// they are there: they are counted from the end, so that some belong to two items, which write the same.
template <typename Division, int kVector, int kPlanes>
struct ResampleItems {
  using Int = decltype(Division::divisor);
  struct Item {
    Int plane, row, column, element;
  };

  int64_t total;
  Int last;  // item's first plane
  Division by_rows, by_columns, by_vectors;

  ResampleItems(int64_t planes, int64_t rows, int64_t columns, int64_t inner)
      : total((planes + kPlanes - 1) / kPlanes * rows * columns * (inner / kVector)),
        last(static_cast<Int>(planes - kPlanes)),
        by_rows(rows),
        by_columns(columns),
        by_vectors(inner / kVector) {}

  TORCHTP_HOST_DEVICE Item at(int64_t index) const {
    const auto item = static_cast<Int>(index);
    const Int pixel = by_vectors.quotient(item), row = by_columns.quotient(pixel), group = by_rows.quotient(row);
    const Int plane = group * kPlanes;
    return {plane < last ? plane : last, row - group * by_rows.divisor, pixel - row * by_columns.divisor,
            (item - pixel * by_vectors.divisor) * kVector};
  }
};

// What is summed up of an item over arrays of planes.
template <typename T, int kVector, int kPlanes, typename Int>
struct ResampleSums {
  const T* from;
  Int first, size;  // of the planes
  Vector<kVector> of[kPlanes] = {};

  TORCHTP_HOST_DEVICE ResampleSums(const T* from, int64_t plane_size, Int plane)
      : from(from), first(plane * static_cast<Int>(plane_size)), size(static_cast<Int>(plane_size)) {}

  TORCHTP_HOST_DEVICE void add(Int place, float weight) {
    Pack<T, kVector> packs[kPlanes];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {  // all on their way before the first is waited for
      packs[p] = load_pack(reinterpret_cast<const Pack<T, kVector>*>(from + (first + place + p * size)));
    }
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      const Vector<kVector> values = widened(packs[p]);
#pragma unroll
      for (int k = 0; k < kVector; ++k) of[p].values[k] += weight * values.values[k];
    }
  }
  template <typename G>
  TORCHTP_HOST_DEVICE void store(G* to, int64_t plane_size, Int plane, Int place) const {
    constexpr int kMost = 16 / sizeof(G), kOnce = kVector < kMost ? kVector : kMost;
    const auto stride = static_cast<Int>(plane_size);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
#pragma unroll
      for (int k = 0; k < kVector; k += kOnce) {
        Pack<G, kOnce> result;
#pragma unroll
        for (int i = 0; i < kOnce; ++i) result.values[i] = static_cast<G>(of[p].values[k + i]);
        store_pack(reinterpret_cast<Pack<G, kOnce>*>(to + ((plane + p) * stride + place + k)), result);
      }
    }
  }
};

// Two dims of dense [outer, y, x, inner] arrays; a dim that stays has the default mode and equal extents.
struct ResampleParams {
  int64_t outer, inner;
  ResampleAxis y, x;

  int64_t in_plane() const { return int64_t{y.in_size} * x.in_size * inner; }
  int64_t out_plane() const { return int64_t{y.out_size} * x.out_size * inner; }
};

// An axis whose mode is known to the compiler by the number of its taps. A dim that stays is read with a weight of
// exactly 1 in every mode.
template <int kTaps>
TORCHTP_HOST_DEVICE ResampleAxis with_taps(const ResampleAxis& axis) {
  ResampleAxis known = axis;
  if constexpr (kTaps == 1) {
    known.mode = axis.mode == Resampling::kNearestExact ? Resampling::kNearestExact : Resampling::kNearest;
  } else {
    known.mode = kTaps == 2 ? Resampling::kLinear : Resampling::kCubic;
  }
  return known;
}

// kTaps: of each dim.
template <typename T, int kVector, int kPlanes, int kTaps, typename Division>
struct Interpolate {
  using Items = ResampleItems<Division, kVector, kPlanes>;
  using Int = typename Items::Int;

  const T* in;
  T* out;
  ResampleAxis y, x;
  Int inner;
  int64_t in_plane, out_plane;
  Items items;

  Interpolate(const T* in, T* out, const ResampleParams& params)
      : in(in),
        out(out),
        y(params.y),
        x(params.x),
        inner(static_cast<Int>(params.inner)),
        in_plane(params.in_plane()),
        out_plane(params.out_plane()),
        items(params.outer, params.y.out_size, params.x.out_size, params.inner) {}

  int64_t total() const { return items.total; }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const ResampleAxis rows = with_taps<kTaps>(y), columns = with_taps<kTaps>(x);
    const auto item = items.at(index);
    const Taps down = rows.taps_of(y.out_begin + static_cast<int32_t>(item.row));
    const Taps across = columns.taps_of(x.out_begin + static_cast<int32_t>(item.column));
    float weights[kTaps];
    Int places[kTaps];
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      weights[k] = columns.weight(across, k);
      places[k] = static_cast<Int>(columns.place(across, k) - x.in_begin) * inner + item.element;
    }
    ResampleSums<T, kVector, kPlanes, Int> sums(in, in_plane, item.plane);
#pragma unroll
    for (int ky = 0; ky < kTaps; ++ky) {
      const float row_weight = rows.weight(down, ky);
      if (row_weight == 0) continue;
      const Int row = static_cast<Int>(rows.place(down, ky) - y.in_begin) * x.in_size * inner;
#pragma unroll
      for (int kx = 0; kx < kTaps; ++kx) {
        const float weight = row_weight * weights[kx];
        if (weight != 0) sums.add(row + places[kx], weight);
      }
    }
    const Int place = (item.row * x.out_size + item.column) * inner + item.element;
    sums.store(out, out_plane, item.plane, place);
  }
};

// The adjoint: what all output rows of this rank give to an item of the input, in order. G is T or float.
template <typename T, typename G, int kVector, int kPlanes, int kTaps, typename Division>
struct InterpolateAdjoint {
  using Items = ResampleItems<Division, kVector, kPlanes>;
  using Int = typename Items::Int;
  static constexpr int kColumns = 4;  // whose weights are kept: as many as read an element at twice its extent

  const T* out;
  G* in;
  ResampleAxis y, x;
  Int inner;
  int64_t in_plane, out_plane;
  Items items;

  InterpolateAdjoint(const T* out, G* in, const ResampleParams& params)
      : out(out),
        in(in),
        y(params.y),
        x(params.x),
        inner(static_cast<Int>(params.inner)),
        in_plane(params.in_plane()),
        out_plane(params.out_plane()),
        items(params.outer, params.y.in_size, params.x.in_size, params.inner) {}

  int64_t total() const { return items.total; }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const ResampleAxis rows = with_taps<kTaps>(y), columns = with_taps<kTaps>(x);
    const auto item = items.at(index);
    const int32_t iy = y.in_begin + static_cast<int32_t>(item.row), ix = x.in_begin + static_cast<int32_t>(item.column);
    const int32_t top = rows.first_of(iy), left = columns.first_of(ix);
    ResampleSums<T, kVector, kPlanes, Int> sums(out, out_plane, item.plane);
    if constexpr (kTaps == 1) {
      // Who reads an element lies side by side, and reads nothing else.
      const int32_t bottom = rows.end_of(top, iy), right = columns.end_of(left, ix);
      for (int32_t oy = top; oy < bottom; ++oy) {
        for (int32_t ox = left; ox < right; ++ox) sums.add(place_of(oy, ox, item.element), 1.0f);
      }
    } else {
      for (int32_t first = left; first < x.out_begin + x.out_size; first += kColumns) {
        float weights[kColumns];
        bool past = false;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          const Taps across = columns.taps_of(first + k);
          past |= columns.place(across, 0) > ix;
          weights[k] = first + k < x.out_begin + x.out_size ? columns.weight_of(across, ix) : 0;
        }
        for (int32_t oy = top; oy < y.out_begin + y.out_size; ++oy) {
          const Taps down = rows.taps_of(oy);
          if (rows.place(down, 0) > iy) break;
          const float row_weight = rows.weight_of(down, iy);
          if (row_weight == 0) continue;
          const Int row = place_of(oy, first, item.element);
#pragma unroll
          for (int k = 0; k < kColumns; ++k) {
            const float weight = row_weight * weights[k];
            if (weight != 0) sums.add(row + k * inner, weight);
          }
        }
        if (past) break;
      }
    }
    const Int place = (item.row * x.in_size + item.column) * inner + item.element;
    sums.store(in, in_plane, item.plane, place);
  }

 private:
  TORCHTP_HOST_DEVICE Int place_of(int32_t oy, int32_t ox, Int element) const {
    return (static_cast<Int>(oy - y.out_begin) * x.out_size + (ox - x.out_begin)) * inner + element;
  }
};

// Calls f(elements, planes, taps, division), all as types, for what `from` allows; the result is aligned as new memory
// is.
template <typename T, typename F>
void with_resampling(const T* from, const ResampleParams& params, const F& f) {
  constexpr int kWide = 16 / sizeof(T);
  if (params.outer == 0) return;
  const auto go = [&](auto vector, auto planes, auto division) {
    const int taps = params.x.num_taps();
    if (taps == 1) return f(vector, planes, std::integral_constant<int, 1>(), division);
    taps == 2 ? f(vector, planes, std::integral_constant<int, 2>(), division)
              : f(vector, planes, std::integral_constant<int, 4>(), division);
  };
  const std::integral_constant<int, 1> one;
  with_division(params.outer * (params.in_plane() + params.out_plane()), [&](auto division) {
    if constexpr (std::is_same_v<decltype(division), Divider>) {
      const std::integral_constant<int, kWide> wide;
      const std::integral_constant<int, 4> some;
      const std::integral_constant<int, 8> many;
      if (aligned(params.inner, kWide, {from})) {
        return params.outer >= some ? go(wide, some, division) : go(wide, one, division);
      }
      if (params.outer >= many) return go(one, many, division);
    }
    go(one, one, division);
  });
}

// See run_on_host.h for Run.
template <typename T, typename Run>
void run_interpolate(const Run& run, const T* in, T* out, const ResampleParams& params) {
  with_resampling(in, params, [&](auto vector, auto planes, auto taps, auto division) {
    run.each(Interpolate<T, vector(), planes(), taps(), decltype(division)>(in, out, params));
  });
}

template <typename T, typename G, typename Run>
void run_interpolate_adjoint(const Run& run, const T* out, G* in, const ResampleParams& params) {
  with_resampling(out, params, [&](auto vector, auto planes, auto taps, auto division) {
    run.each(InterpolateAdjoint<T, G, vector(), planes(), taps(), decltype(division)>(out, in, params));
  });
}

}  // namespace torchtp::kernels
