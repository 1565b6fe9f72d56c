#pragma once

#include <cstdint>

namespace torchtp::kernels {

// Resampling of the middle dim of a dense [outer, in_extent, inner] array to [outer, out_extent, inner]:
// out[o] = sum over k < taps of weights[o * taps + k] * in[places[o * taps + k]]. With more than two taps the places of
// an output may end early, with a negative one.
template <typename T>
struct Interpolation {
  int64_t in_extent;
  int64_t out_extent;
  int64_t inner;
  int64_t taps;
  const int64_t* places;
  const T* weights;
};

// For the outer indices [begin, end); ranges are independent.
template <typename T>
void interpolate_cpu(const T* in, T* out, const Interpolation<T>& params, int64_t begin, int64_t end);

// The adjoint: adds every out row's share to the in rows, which must be zero before.
template <typename T>
void interpolate_adjoint_cpu(const T* out, T* in, const Interpolation<T>& params, int64_t begin, int64_t end);

}  // namespace torchtp::kernels
