#include <algorithm>

#include "kernels/interpolate.h"

namespace torchtp::kernels {

template <typename T>
void interpolate_cpu(const T* in, T* out, const Interpolation& params, int64_t begin, int64_t end) {
  const int64_t inner = params.inner, taps = params.taps;
  for (int64_t outer = begin; outer < end; ++outer) {
    const T* const plane = in + outer * params.in_extent * inner;
    T* target = out + outer * params.out_extent * inner;
    for (int64_t o = 0; o < params.out_extent; ++o, target += inner) {
      const int64_t* const places = params.places + o * taps;
      const double* const weights = params.weights + o * taps;
      if (taps == 1) {
        std::copy_n(plane + places[0] * inner, inner, target);
      } else if (taps == 2) {
        const T *const a = plane + places[0] * inner, *const b = plane + places[1] * inner;
        const T u = static_cast<T>(weights[0]), v = static_cast<T>(weights[1]);
        for (int64_t i = 0; i < inner; ++i) target[i] = u * a[i] + v * b[i];
      } else {
        std::fill_n(target, inner, T(0));
        for (int64_t k = 0; k < taps && places[k] >= 0; ++k) {
          const T* const source = plane + places[k] * inner;
          const T weight = static_cast<T>(weights[k]);
          for (int64_t i = 0; i < inner; ++i) target[i] += weight * source[i];
        }
      }
    }
  }
}

template <typename T>
void interpolate_adjoint_cpu(const T* out, T* in, const Interpolation& params, int64_t begin, int64_t end) {
  const int64_t inner = params.inner, taps = params.taps;
  for (int64_t outer = begin; outer < end; ++outer) {
    T* const plane = in + outer * params.in_extent * inner;
    const T* source = out + outer * params.out_extent * inner;
    for (int64_t o = 0; o < params.out_extent; ++o, source += inner) {
      for (int64_t k = 0; k < taps && params.places[o * taps + k] >= 0; ++k) {
        T* const target = plane + params.places[o * taps + k] * inner;
        const T weight = static_cast<T>(params.weights[o * taps + k]);
        for (int64_t i = 0; i < inner; ++i) target[i] += weight * source[i];
      }
    }
  }
}

template void interpolate_cpu(const float*, float*, const Interpolation&, int64_t, int64_t);
template void interpolate_cpu(const double*, double*, const Interpolation&, int64_t, int64_t);
template void interpolate_adjoint_cpu(const float*, float*, const Interpolation&, int64_t, int64_t);
template void interpolate_adjoint_cpu(const double*, double*, const Interpolation&, int64_t, int64_t);

}  // namespace torchtp::kernels
