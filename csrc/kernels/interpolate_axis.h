#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "kernels/vectors.h"

// Resampling with coordinates computed where they are needed, for the device: no table of taps to copy there.
// Coordinates are global and in float, as ATen's are for these types.
namespace torchtp::kernels {

enum class Resampling : int32_t { kNearest, kNearestExact, kLinear, kCubic };

struct Tap {
  int32_t place;  // global input row
  float weight;
};

// Not fused with what is added to it: the place must be the same on every device, or it rounds to another row.
inline TORCHTP_HOST_DEVICE float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  volatile float product = a * b;
  return product;
#endif
}

// One dim. Rows of this rank are [in_begin, in_begin + in_size) of in_extent, and [out_begin, ...) of out_extent.
struct ResampleAxis {
  int32_t in_extent = 1, in_begin = 0, in_size = 1;
  int32_t out_extent = 1, out_begin = 0, out_size = 1;
  float step = 1;  // input rows from one output row to the next
  bool align_corners = false;
  Resampling mode = Resampling::kNearest;

  // scale: output rows an input row, 0 where the extents say it.
  void set_step(double scale) {
    if (align_corners && (mode == Resampling::kLinear || mode == Resampling::kCubic)) {
      step = out_extent > 1 ? static_cast<float>(in_extent - 1) / static_cast<float>(out_extent - 1) : 0.0f;
    } else {
      align_corners = false;
      step =
          scale > 0 ? static_cast<float>(1.0 / scale) : static_cast<float>(in_extent) / static_cast<float>(out_extent);
    }
  }

  TORCHTP_HOST_DEVICE int taps() const {
    return mode == Resampling::kLinear ? 2 : (mode == Resampling::kCubic ? 4 : 1);
  }
  TORCHTP_HOST_DEVICE int32_t clipped(int32_t row) const {
    return row < 0 ? 0 : (row < in_extent ? row : in_extent - 1);
  }

  // Tap k of global output row o.
  TORCHTP_HOST_DEVICE Tap tap(int32_t o, int k) const {
    const auto row = static_cast<float>(o);
    if (mode == Resampling::kNearest) return {clipped(static_cast<int32_t>(floorf(row * step))), 1.0f};
    if (mode == Resampling::kNearestExact) return {clipped(static_cast<int32_t>(floorf((row + 0.5f) * step))), 1.0f};
    float place = align_corners ? step * row : rounded_product(step, row + 0.5f) - 0.5f;
    if (mode == Resampling::kLinear) {
      if (in_extent == out_extent) return {o, k == 0 ? 1.0f : 0.0f};  // as ATen: copied, whatever the scale says
      if (place < 0) place = 0;
      const int32_t first = clipped(static_cast<int32_t>(floorf(place)));
      float share = place - static_cast<float>(first);
      share = share < 0 ? 0 : (share > 1 ? 1 : share);
      return k == 0 ? Tap{first, 1.0f - share} : Tap{clipped(first + 1), share};
    }
    const float floor = floorf(place);
    return {clipped(static_cast<int32_t>(floor) - 1 + k), cubic_weight(place - floor, k)};
  }

  // Sum of the weights with which output row o reads input row i.
  TORCHTP_HOST_DEVICE float weight(int32_t o, int32_t i) const {
    float sum = 0;
    for (int k = 0; k < taps(); ++k) {
      const Tap one = tap(o, k);
      if (one.place == i) sum += one.weight;
    }
    return sum;
  }

  // Output rows of this rank among which are all that read input row i; a few more than those.
  TORCHTP_HOST_DEVICE void readers(int32_t i, int32_t& begin, int32_t& end) const {
    const int32_t reach = mode == Resampling::kCubic ? 3 : 2;
    begin = out_begin;
    end = out_begin + out_size;
    if (in_extent == out_extent && mode == Resampling::kLinear) {
      begin = begin > i ? begin : i;
      end = end < i + 1 ? end : i + 1;
      return;
    }
    if (!(step > 0)) return;
    // Rows clipped at either end belong to its last row, so there everything beyond is taken in.
    if (i - reach > 0) {
      const auto low = static_cast<float>(i - reach) / step - 1.0f;
      if (low > static_cast<float>(begin)) begin = static_cast<int32_t>(low);
    }
    if (i + reach < in_extent - 1) {
      const auto high = static_cast<float>(i + reach + 1) / step + 2.0f;
      if (high < static_cast<float>(end)) end = static_cast<int32_t>(high);
    }
  }

 private:
  // Keys' kernel with A = -0.75, for tap k of a row that lies `t` behind tap 1.
  static TORCHTP_HOST_DEVICE float cubic_weight(float t, int k) {
    constexpr float kA = -0.75f;
    const bool near = k == 1 || k == 2;
    const float x = k == 0 ? t + 1 : (k == 1 ? t : (k == 2 ? 1 - t : 2 - t));
    return near ? ((kA + 2) * x - (kA + 3)) * x * x + 1 : ((kA * x - 5 * kA) * x + 8 * kA) * x - 4 * kA;
  }
};

// Two dims at once of dense [outer, y, x, inner] arrays; a dim that stays has the default mode and equal extents.
struct ResampleParams {
  int64_t outer, inner;
  ResampleAxis y, x;
};

// kVector elements of the output.
template <typename T, int kVector>
struct Interpolate {
  const T* in;
  T* out;
  ResampleParams params;

  int64_t total() const { return params.outer * params.y.out_size * params.x.out_size * (params.inner / kVector); }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t vectors = params.inner / kVector, pixel = index / vectors, row = pixel / params.x.out_size;
    const int64_t outer = row / params.y.out_size, i = (index - pixel * vectors) * kVector;
    const auto ox = params.x.out_begin + static_cast<int32_t>(pixel - row * params.x.out_size);
    const auto oy = params.y.out_begin + static_cast<int32_t>(row - outer * params.y.out_size);
    float sums[kVector] = {};
    for (int ky = 0; ky < params.y.taps(); ++ky) {
      const Tap down = params.y.tap(oy, ky);
      if (down.weight == 0) continue;
      const int64_t first = (outer * params.y.in_size + down.place - params.y.in_begin) * params.x.in_size;
      for (int kx = 0; kx < params.x.taps(); ++kx) {
        const Tap across = params.x.tap(ox, kx);
        if (across.weight == 0) continue;
        const int64_t at = (first + across.place - params.x.in_begin) * params.inner + i;
        const auto pack = *reinterpret_cast<const Pack<T, kVector>*>(in + at);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          sums[k] += down.weight * across.weight * static_cast<float>(pack.values[k]);
        }
      }
    }
    Pack<T, kVector> result;
#pragma unroll
    for (int k = 0; k < kVector; ++k) result.values[k] = static_cast<T>(sums[k]);
    *reinterpret_cast<Pack<T, kVector>*>(out + index * kVector) = result;
  }
};

// kVector elements of the adjoint's result: what all output rows of this rank give to them, in order.
template <typename T, int kVector>
struct InterpolateAdjoint {
  const T* out;
  T* in;
  ResampleParams params;

  int64_t total() const { return params.outer * params.y.in_size * params.x.in_size * (params.inner / kVector); }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t vectors = params.inner / kVector, pixel = index / vectors, row = pixel / params.x.in_size;
    const int64_t outer = row / params.y.in_size, i = (index - pixel * vectors) * kVector;
    const auto ix = params.x.in_begin + static_cast<int32_t>(pixel - row * params.x.in_size);
    const auto iy = params.y.in_begin + static_cast<int32_t>(row - outer * params.y.in_size);
    int32_t top, bottom, left, right;
    params.y.readers(iy, top, bottom);
    params.x.readers(ix, left, right);
    float sums[kVector] = {};
    for (int32_t oy = top; oy < bottom; ++oy) {
      const float down = params.y.weight(oy, iy);
      if (down == 0) continue;
      const int64_t first = (outer * params.y.out_size + oy - params.y.out_begin) * params.x.out_size;
      for (int32_t ox = left; ox < right; ++ox) {
        const float across = params.x.weight(ox, ix);
        if (across == 0) continue;
        const int64_t at = (first + ox - params.x.out_begin) * params.inner + i;
        const auto pack = *reinterpret_cast<const Pack<T, kVector>*>(out + at);
#pragma unroll
        for (int k = 0; k < kVector; ++k) sums[k] += down * across * static_cast<float>(pack.values[k]);
      }
    }
    Pack<T, kVector> result;
#pragma unroll
    for (int k = 0; k < kVector; ++k) result.values[k] = static_cast<T>(sums[k]);
    *reinterpret_cast<Pack<T, kVector>*>(in + index * kVector) = result;
  }
};

// See run_on_host.h for Run.
template <typename T, typename Run>
void run_interpolate(const Run& run, const T* in, T* out, const ResampleParams& params) {
  constexpr int kWide = 16 / sizeof(T);
  if (aligned(params.inner, kWide, {in, static_cast<const T*>(out)})) {
    run.each(Interpolate<T, kWide>{in, out, params});
  } else {
    run.each(Interpolate<T, 1>{in, out, params});
  }
}

template <typename T, typename Run>
void run_interpolate_adjoint(const Run& run, const T* out, T* in, const ResampleParams& params) {
  constexpr int kWide = 16 / sizeof(T);
  if (aligned(params.inner, kWide, {out, static_cast<const T*>(in)})) {
    run.each(InterpolateAdjoint<T, kWide>{out, in, params});
  } else {
    run.each(InterpolateAdjoint<T, 1>{out, in, params});
  }
}

}  // namespace torchtp::kernels
