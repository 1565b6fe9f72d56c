#pragma once

#include <algorithm>
#include <initializer_list>

#include "kernels/norm_reduce.h"
#include "kernels/vectors.h"

// Which program computes a pass of a norm on the device; see run_on_host.h for Run. The CPU's own loops are in
// norm_cpu.cpp, with the same arithmetic.
namespace torchtp::kernels {

// y or dx, kVector elements at once.
template <typename T, int kVector, bool kChannelsLast, bool kGrad>
struct NormApply {
  const T* dy;  // of norm_grad only
  const T* x;
  T* out;
  const float* center;
  const float* on_dy;  // of norm_grad only
  const float* on_x;
  const float* shift;
  int64_t batches;
  NormShape shape;

  int64_t total() const { return batches * shape.channels * shape.inner / kVector; }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t at = index * kVector, plane = at / shape.inner;
    const int64_t n = kChannelsLast ? at / (shape.inner * shape.channels) : plane / shape.channels;
    const int64_t c = kChannelsLast ? at % shape.channels : plane - n * shape.channels;
    const int64_t factor = n * shape.batch_stride + c;
    const auto in = *reinterpret_cast<const Pack<T, kVector>*>(x + at);
    Pack<T, kVector> grad{}, result;
    if constexpr (kGrad) grad = *reinterpret_cast<const Pack<T, kVector>*>(dy + at);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const int64_t here = kChannelsLast ? factor + k : factor;
      const float value = static_cast<float>(in.values[k]);
      if constexpr (kGrad) {
        result.values[k] = static_cast<T>(
            norm_grad(static_cast<float>(grad.values[k]), value, center[here], on_dy[here], on_x[here], shift[here]));
      } else {
        result.values[k] = static_cast<T>(norm_apply(value, center[here], on_x[here], shift[here]));
      }
    }
    *reinterpret_cast<Pack<T, kVector>*>(out + at) = result;
  }
};

template <typename T, bool kGrad, typename Run>
void run_norm_apply(const Run& run, const T* dy, const T* x, T* out, const float* center, const float* on_dy,
                    const float* on_x, const float* shift, int64_t batches, const NormShape& shape,
                    bool channels_last) {
  constexpr int kWide = 16 / sizeof(T);
  const auto go = [&](auto work) { run.each(decltype(work){dy, x, out, center, on_dy, on_x, shift, batches, shape}); };
  const int64_t innermost = channels_last ? shape.channels : shape.inner;
  if (batches * shape.channels * shape.inner == 0) return;
  const bool wide = aligned(innermost, kWide, {kGrad ? dy : x, x, static_cast<const T*>(out)});
  if (channels_last) {
    wide ? go(NormApply<T, kWide, true, kGrad>{}) : go(NormApply<T, 1, true, kGrad>{});
  } else {
    wide ? go(NormApply<T, kWide, false, kGrad>{}) : go(NormApply<T, 1, false, kGrad>{});
  }
}

// Calls f(a value of the program's type) for the program that reduces such a tensor.
template <typename T, bool kDots, typename F>
void with_norm_reduce(const T* x, const T* dy, const NormShape& shape, bool channels_last, const F& f) {
  constexpr int kWide = 16 / sizeof(T);
  if (channels_last) {
    aligned(shape.channels, 4, {x, dy}) ? f(NormReduceRows<T, 4, kDots>{}) : f(NormReduceRows<T, 1, kDots>{});
  } else {
    aligned(shape.inner, kWide, {x, dy}) ? f(NormReducePlanes<T, kWide, kDots>{}) : f(NormReducePlanes<T, 1, kDots>{});
  }
}

// dy: null for moments.
template <typename T>
int64_t norm_reduce_pieces(const T* x, const T* dy, const NormShape& shape, bool channels_last) {
  int64_t pieces = 0;
  with_norm_reduce<T, true>(x, dy, shape, channels_last,
                            [&](auto kind) { pieces = decltype(kind)::pieces(shape, shape.inner); });
  return pieces;
}

// counts may be null; scaled too, which is aligned as new memory is.
template <typename T, bool kDots, typename Run>
void run_norm_reduce(const Run& run, const T* x, const T* dy, const float* center, double* first, double* second,
                     double* counts, T* scaled, const float* scale, int64_t batches, const NormShape& shape,
                     bool channels_last, int64_t pieces) {
  if (batches * shape.channels * shape.inner == 0) return;
  with_norm_reduce<T, kDots>(x, dy, shape, channels_last, [&](auto kind) {
    run.program(decltype(kind)::make({x, dy, center, first, second, counts, scaled, scale, batches, shape, pieces}));
  });
}

}  // namespace torchtp::kernels
