#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "kernels/divider.h"
#include "kernels/interpolate_axis.h"
#include "kernels/vectors.h"

// Resampling of two dims at once, for the device: an item is kVector neighbouring elements of a pixel in some planes,
// which share their taps.
namespace torchtp::kernels {

// Items of [planes, rows, columns, inner] arrays.
template <typename Division, int kVector>
struct ResampleItems {
  using Int = decltype(Division::divisor);
  static constexpr int kPlanes = kVector == 1 ? 8 : 4;
  struct Item {
    int64_t plane;
    Int row, column, element;
  };

  int64_t planes, total;
  Division by_rows, by_columns, by_vectors;

  ResampleItems(int64_t planes, int64_t rows, int64_t columns, int64_t inner)
      : planes(planes),
        total((planes + kPlanes - 1) / kPlanes * rows * columns * (inner / kVector)),
        by_rows(rows),
        by_columns(columns),
        by_vectors(inner / kVector) {}

  TORCHTP_HOST_DEVICE Item at(int64_t index) const {
    const auto item = static_cast<Int>(index);
    const Int pixel = by_vectors.quotient(item), row = by_columns.quotient(pixel), group = by_rows.quotient(row);
    return {int64_t{group} * kPlanes, row - group * by_rows.divisor, pixel - row * by_columns.divisor,
            (item - pixel * by_vectors.divisor) * kVector};
  }
  TORCHTP_HOST_DEVICE bool has(const Item& item, int plane) const { return item.plane + plane < planes; }
};

// What is summed up of an item, and where it goes.
template <typename T, int kVector, int kPlanes>
struct ResampleSums {
  Vector<kVector> of[kPlanes] = {};

  template <typename Items, typename Item, typename Int>
  TORCHTP_HOST_DEVICE void add(const T* from, int64_t plane_size, Int place, float weight, const Items& items,
                               const Item& item) {
    Pack<T, kVector> packs[kPlanes];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {  // all on their way before the first is waited for
      packs[p] = items.has(item, p)
                     ? load_pack(reinterpret_cast<const Pack<T, kVector>*>(from + p * plane_size + place))
                     : Pack<T, kVector>{};
    }
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      const Vector<kVector> values = widened(packs[p]);
#pragma unroll
      for (int k = 0; k < kVector; ++k) of[p].values[k] += weight * values.values[k];
    }
  }
  template <typename Items, typename Item, typename Int>
  TORCHTP_HOST_DEVICE void store(T* to, int64_t plane_size, Int place, const Items& items, const Item& item) const {
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      if (!items.has(item, p)) return;
      Pack<T, kVector> result;
#pragma unroll
      for (int k = 0; k < kVector; ++k) result.values[k] = static_cast<T>(of[p].values[k]);
      store_pack(reinterpret_cast<Pack<T, kVector>*>(to + p * plane_size + place), result);
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

template <typename T, int kVector, typename Division>
struct Interpolate {
  using Items = ResampleItems<Division, kVector>;
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
    const auto item = items.at(index);
    const Taps down = y.taps_of(y.out_begin + static_cast<int32_t>(item.row));
    const Taps across = x.taps_of(x.out_begin + static_cast<int32_t>(item.column));
    const T* const from = in + item.plane * in_plane;
    ResampleSums<T, kVector, Items::kPlanes> sums;
    for (int ky = 0; ky < y.num_taps(); ++ky) {
      const float row_weight = y.weight(down, ky);
      if (row_weight == 0) continue;
      const Int row = static_cast<Int>(y.place(down, ky) - y.in_begin) * x.in_size;
      for (int kx = 0; kx < x.num_taps(); ++kx) {
        const float weight = row_weight * x.weight(across, kx);
        if (weight == 0) continue;
        const Int place = (row + (x.place(across, kx) - x.in_begin)) * inner + item.element;
        sums.add(from, in_plane, place, weight, items, item);
      }
    }
    const Int place = (item.row * x.out_size + item.column) * inner + item.element;
    sums.store(out + item.plane * out_plane, out_plane, place, items, item);
  }
};

// The adjoint: what all output rows of this rank give to an item of the input, in order.
template <typename T, int kVector, typename Division>
struct InterpolateAdjoint {
  using Items = ResampleItems<Division, kVector>;
  using Int = typename Items::Int;

  const T* out;
  T* in;
  ResampleAxis y, x;
  Int inner;
  int64_t in_plane, out_plane;
  Items items;

  InterpolateAdjoint(const T* out, T* in, const ResampleParams& params)
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
    const auto item = items.at(index);
    const int32_t iy = y.in_begin + static_cast<int32_t>(item.row), ix = x.in_begin + static_cast<int32_t>(item.column);
    const int32_t left = x.first_reader(ix), right = x.out_begin + x.out_size, bottom = y.out_begin + y.out_size;
    const T* const from = out + item.plane * out_plane;
    ResampleSums<T, kVector, Items::kPlanes> sums;
    for (int32_t oy = y.first_reader(iy); oy < bottom; ++oy) {
      const Taps down = y.taps_of(oy);
      if (y.place(down, 0) > iy) break;
      const float row_weight = y.weight_of(down, iy);
      if (row_weight == 0) continue;
      const Int row = static_cast<Int>(oy - y.out_begin) * x.out_size;
      for (int32_t ox = left; ox < right; ++ox) {
        const Taps across = x.taps_of(ox);
        if (x.place(across, 0) > ix) break;
        const float weight = row_weight * x.weight_of(across, ix);
        if (weight == 0) continue;
        const Int place = (row + (ox - x.out_begin)) * inner + item.element;
        sums.add(from, out_plane, place, weight, items, item);
      }
    }
    const Int place = (item.row * x.in_size + item.column) * inner + item.element;
    sums.store(in + item.plane * in_plane, in_plane, place, items, item);
  }
};

// Calls f(vector of that many elements, division) for what `from` and `to` allow.
template <typename T, typename F>
void with_resampling(const T* from, const T* to, const ResampleParams& params, const F& f) {
  constexpr int kWide = 16 / sizeof(T);
  with_division(params.outer * (params.in_plane() + params.out_plane()), [&](auto division) {
    if (aligned(params.inner, kWide, {from, to})) {
      f(std::integral_constant<int, kWide>(), division);
    } else {
      f(std::integral_constant<int, 1>(), division);
    }
  });
}

// See run_on_host.h for Run.
template <typename T, typename Run>
void run_interpolate(const Run& run, const T* in, T* out, const ResampleParams& params) {
  with_resampling(in, static_cast<const T*>(out), params, [&](auto vector, auto division) {
    run.each(Interpolate<T, decltype(vector)::value, decltype(division)>(in, out, params));
  });
}

template <typename T, typename Run>
void run_interpolate_adjoint(const Run& run, const T* out, T* in, const ResampleParams& params) {
  with_resampling(out, static_cast<const T*>(in), params, [&](auto vector, auto division) {
    run.each(InterpolateAdjoint<T, decltype(vector)::value, decltype(division)>(out, in, params));
  });
}

}  // namespace torchtp::kernels
