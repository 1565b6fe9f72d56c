#pragma once

#include <algorithm>
#include <initializer_list>

#include "kernels/divider.h"
#include "kernels/norm_reduce.h"
#include "kernels/vectors.h"

// Which program computes a pass of a norm on the device; see run_on_host.h for Run. The CPU's own loops are in
// norm_cpu.cpp, with the same arithmetic.
namespace torchtp::kernels {

// The factors of kCount neighbouring channels.
template <int kCount>
TORCHTP_HOST_DEVICE Vector<kCount> load_factors(const float* from) {
  Vector<kCount> factors;
  constexpr int kPack = kCount % 4 == 0 ? 4 : 1;
#pragma unroll
  for (int k = 0; k < kCount; k += kPack) {
    const auto pack = load_pack(reinterpret_cast<const Pack<float, kPack>*>(from + k));
#pragma unroll
    for (int i = 0; i < kPack; ++i) factors.values[k + i] = pack.values[i];
  }
  return factors;
}

// y or dx. An item is kVector neighbouring elements in kSteps places of the same factors: of a plane, or of the rows of
// a batch where channels come last.
template <typename T, int kVector, bool kChannelsLast, bool kGrad, typename Division>
struct NormApply {
  static constexpr int kSteps = 4;
  static constexpr int kFactors = kChannelsLast ? kVector : 1;

  const T* dy;  // of norm_grad only
  const T* x;
  T* out;
  const float* center;
  const float* on_dy;  // of norm_grad only
  const float* on_x;
  const float* shift;
  int64_t outer, extent, width, apart;  // planes or batches; places, of `width` vectors; from one step to the next
  int64_t channels, batch_stride;
  Division by_apart, by_width, by_channels;

  NormApply(const T* dy, const T* x, T* out, const float* center, const float* on_dy, const float* on_x,
            const float* shift, int64_t batches, const NormShape& shape)
      : dy(dy),
        x(x),
        out(out),
        center(center),
        on_dy(on_dy),
        on_x(on_x),
        shift(shift),
        outer(kChannelsLast ? batches : batches * shape.channels),
        extent(kChannelsLast ? shape.inner : shape.inner / kVector),
        width(kChannelsLast ? shape.channels / kVector : 1),
        apart((extent + kSteps - 1) / kSteps),
        channels(shape.channels),
        batch_stride(shape.batch_stride),
        by_apart(apart),
        by_width(width),
        by_channels(channels) {}

  int64_t total() const { return outer * apart * width; }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t rest = by_width.quotient(index), column = index - rest * width;
    const int64_t which = by_apart.quotient(rest), first = rest - which * apart;
    const int64_t n = kChannelsLast ? which : by_channels.quotient(which);
    const int64_t factor = n * batch_stride + (kChannelsLast ? column * kVector : which - n * channels);
    Pack<T, kVector> values[kSteps], grads[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (first + s * apart >= extent) continue;
      const int64_t at = ((which * extent + first + s * apart) * width + column) * kVector;
      values[s] = load_pack(reinterpret_cast<const Pack<T, kVector>*>(x + at));
      if constexpr (kGrad) grads[s] = load_pack(reinterpret_cast<const Pack<T, kVector>*>(dy + at));
    }
    const Vector<kFactors> middle = load_factors<kFactors>(center + factor),
                           scale = load_factors<kFactors>(on_x + factor),
                           added = load_factors<kFactors>(shift + factor);
    Vector<kFactors> grad_scale{};
    if constexpr (kGrad) grad_scale = load_factors<kFactors>(on_dy + factor);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (first + s * apart >= extent) return;
      const int64_t at = ((which * extent + first + s * apart) * width + column) * kVector;
      const Vector<kVector> in = widened(values[s]);
      Vector<kVector> grad{};
      if constexpr (kGrad) grad = widened(grads[s]);
      Pack<T, kVector> result;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const int f = kChannelsLast ? k : 0;
        result.values[k] =
            static_cast<T>(kGrad ? norm_grad(grad.values[k], in.values[k], middle.values[f], grad_scale.values[f],
                                             scale.values[f], added.values[f])
                                 : norm_apply(in.values[k], middle.values[f], scale.values[f], added.values[f]));
      }
      store_pack(reinterpret_cast<Pack<T, kVector>*>(out + at), result);
    }
  }
};

template <typename T, bool kGrad, typename Run>
void run_norm_apply(const Run& run, const T* dy, const T* x, T* out, const float* center, const float* on_dy,
                    const float* on_x, const float* shift, int64_t batches, const NormShape& shape,
                    bool channels_last) {
  constexpr int kWide = 16 / sizeof(T);
  const int64_t elements = batches * shape.channels * shape.inner;
  if (elements == 0) return;
  bool wide =
      aligned(channels_last ? shape.channels : shape.inner, kWide, {kGrad ? dy : x, x, static_cast<const T*>(out)});
  if (channels_last) wide &= aligned(shape.channels, 4, {center, kGrad ? on_dy : center, on_x, shift});
  with_division(elements, [&](auto division) {
    using Division = decltype(division);
    const auto go = [&](auto vector, auto last) {
      run.each(NormApply<T, decltype(vector)::value, decltype(last)::value, kGrad, Division>(
          dy, x, out, center, on_dy, on_x, shift, batches, shape));
    };
    const auto go_wide = [&](auto last) {
      wide ? go(std::integral_constant<int, kWide>(), last) : go(std::integral_constant<int, 1>(), last);
    };
    channels_last ? go_wide(std::true_type()) : go_wide(std::false_type());
  });
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

// counts may be null; scaled too, which is aligned as new memory is. num_centers: groups of channels, each with a
// center.
template <typename T, bool kDots, typename Run>
void run_norm_reduce(const Run& run, const T* x, const T* dy, const float* center, double* first, double* second,
                     double* counts, T* scaled, const float* scale, int64_t batches, const NormShape& shape,
                     bool channels_last, int64_t pieces, int64_t num_centers) {
  if (batches * shape.channels * shape.inner == 0) return;
  with_norm_reduce<T, kDots>(x, dy, shape, channels_last, [&](auto kind) {
    run.program(decltype(kind)::make(
        {x, dy, center, first, second, counts, scaled, scale, batches, shape, pieces, num_centers}));
  });
}

}  // namespace torchtp::kernels
