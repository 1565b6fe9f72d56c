#pragma once

#include <cstdint>

#include "kernels/vectors.h"

namespace torchtp::kernels {

// A number for each channel, as a parameter keeps it: in the type of the activations or in float; the other is null.
// Parameters of one op are kept alike.
template <typename T>
struct Factors {
  const T* narrow;
  const float* wide;

  // Whether they may be loaded by 16 bytes.
  bool aligned() const { return (reinterpret_cast<uintptr_t>(narrow) | reinterpret_cast<uintptr_t>(wide)) % 16 == 0; }
};

// Calls f with pointers to what there is, so that one question is asked for all channels.
template <typename T, typename F>
TORCHTP_HOST_DEVICE void with_factors(const Factors<T>& one, const F& f) {
  one.narrow ? f(one.narrow) : f(one.wide);
}
template <typename T, typename F>
TORCHTP_HOST_DEVICE void with_factors(const Factors<T>& one, const Factors<T>& other, const F& f) {
  one.narrow ? f(one.narrow, other.narrow) : f(one.wide, other.wide);
}

// kCount numbers side by side, by as few loads as there can be.
template <int kCount, typename Number>
TORCHTP_HOST_DEVICE Vector<kCount> load_numbers(const Number* from) {
  constexpr int kMost = 16 / sizeof(Number), kOnce = kCount < kMost ? kCount : kMost;
  Vector<kCount> numbers;
#pragma unroll
  for (int k = 0; k < kCount; k += kOnce) {
    const Vector<kOnce> some = widened(load_pack(reinterpret_cast<const Pack<Number, kOnce>*>(from + k)));
#pragma unroll
    for (int i = 0; i < kOnce; ++i) numbers.values[k + i] = some.values[i];
  }
  return numbers;
}

}  // namespace torchtp::kernels
