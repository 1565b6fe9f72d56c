#include <algorithm>

#include "kernels/interpolate.h"

namespace torchtp::kernels {
namespace {

// Of the taps of one output those before the first negative place.
int64_t count(const int64_t* places, int64_t taps) {
  while (taps > 0 && places[taps - 1] < 0) --taps;
  return taps;
}

// Along the innermost dim: sums of products.
template <typename T>
void interpolate_row(const T* row, T* target, const Interpolation<T>& params) {
  const int64_t* places = params.places;
  const T* weights = params.weights;
  if (params.taps == 2) {
    for (int64_t o = 0; o < params.out_extent; ++o, places += 2, weights += 2) {
      target[o] = weights[0] * row[places[0]] + weights[1] * row[places[1]];
    }
    return;
  }
  for (int64_t o = 0; o < params.out_extent; ++o, places += params.taps, weights += params.taps) {
    T sum = 0;
    for (int64_t k = 0; k < params.taps && places[k] >= 0; ++k) sum += weights[k] * row[places[k]];
    target[o] = sum;
  }
}

// Along any other: sums of runs, four at a time.
template <typename T>
void add_runs(const T* plane, T* target, int64_t inner, const int64_t* places, const T* weights, int64_t taps) {
  std::fill_n(target, inner, T(0));
  int64_t k = 0;
  for (; k + 4 <= taps; k += 4) {
    const T *const a = plane + places[k] * inner, *const b = plane + places[k + 1] * inner,
                   *const c = plane + places[k + 2] * inner, *const d = plane + places[k + 3] * inner;
    const T u = weights[k], v = weights[k + 1], w = weights[k + 2], x = weights[k + 3];
#pragma omp simd
    for (int64_t i = 0; i < inner; ++i) target[i] += (u * a[i] + v * b[i]) + (w * c[i] + x * d[i]);
  }
  for (; k < taps; ++k) {
    const T* const source = plane + places[k] * inner;
    const T weight = weights[k];
#pragma omp simd
    for (int64_t i = 0; i < inner; ++i) target[i] += weight * source[i];
  }
}

}  // namespace

template <typename T>
void interpolate_cpu(const T* in, T* out, const Interpolation<T>& params, int64_t begin, int64_t end) {
  const int64_t inner = params.inner, taps = params.taps;
  for (int64_t outer = begin; outer < end; ++outer) {
    const T* const plane = in + outer * params.in_extent * inner;
    T* target = out + outer * params.out_extent * inner;
    if (inner == 1 && taps > 1) {
      interpolate_row(plane, target, params);
      continue;
    }
    for (int64_t o = 0; o < params.out_extent; ++o, target += inner) {
      const int64_t* const places = params.places + o * taps;
      const T* const weights = params.weights + o * taps;
      if (taps == 1) {
        std::copy_n(plane + places[0] * inner, inner, target);
      } else if (taps == 2) {
        const T *const a = plane + places[0] * inner, *const b = plane + places[1] * inner;
        const T u = weights[0], v = weights[1];
#pragma omp simd
        for (int64_t i = 0; i < inner; ++i) target[i] = u * a[i] + v * b[i];
      } else {
        add_runs(plane, target, inner, places, weights, count(places, taps));
      }
    }
  }
}

template <typename T>
void interpolate_adjoint_cpu(const T* out, T* in, const Interpolation<T>& params, int64_t begin, int64_t end) {
  const int64_t inner = params.inner, taps = params.taps;
  for (int64_t outer = begin; outer < end; ++outer) {
    T* const plane = in + outer * params.in_extent * inner;
    const T* source = out + outer * params.out_extent * inner;
    for (int64_t o = 0; o < params.out_extent; ++o, source += inner) {
      const int64_t* const places = params.places + o * taps;
      const T* const weights = params.weights + o * taps;
      for (int64_t k = 0; k < taps && places[k] >= 0; ++k) {
        if (inner == 1) {
          plane[places[k]] += weights[k] * *source;
          continue;
        }
        T* const target = plane + places[k] * inner;
        const T weight = weights[k];
#pragma omp simd
        for (int64_t i = 0; i < inner; ++i) target[i] += weight * source[i];
      }
    }
  }
}

template void interpolate_cpu(const float*, float*, const Interpolation<float>&, int64_t, int64_t);
template void interpolate_cpu(const double*, double*, const Interpolation<double>&, int64_t, int64_t);
template void interpolate_adjoint_cpu(const float*, float*, const Interpolation<float>&, int64_t, int64_t);
template void interpolate_adjoint_cpu(const double*, double*, const Interpolation<double>&, int64_t, int64_t);

}  // namespace torchtp::kernels
