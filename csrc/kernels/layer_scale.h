#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "kernels/vectors.h"

namespace torchtp::kernels {

// residual + branch * gamma[c] * keep[n] over [batches, channels, inner], or [batches, inner, channels] where channels
// come last: a block's layer scale, DropPath and residual in one pass. Without a residual it is the gradient of the
// branch, from the gradient of the result. A is float, or double for double.
template <typename T, typename A>
struct LayerScaleParams {
  const T* residual;  // may be null
  const T* branch;
  const A* gamma;  // [C], may be null: one
  const A* keep;   // [N], may be null: one
  T* out;
  int64_t batches, channels, inner;

  int64_t elements() const { return batches * channels * inner; }
};

// kVector elements, which share their channel, or lie in neighbouring channels where those come last.
template <typename T, typename A, int kVector, bool kChannelsLast>
struct LayerScale {
  LayerScaleParams<T, A> params;

  int64_t total() const { return params.elements() / kVector; }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t at = index * kVector, plane = at / params.inner;
    const int64_t n = kChannelsLast ? at / (params.inner * params.channels) : plane / params.channels;
    const int64_t c = kChannelsLast ? at % params.channels : plane - n * params.channels;
    const A kept = params.keep ? params.keep[n] : A(1);
    const auto branch = *reinterpret_cast<const Pack<T, kVector>*>(params.branch + at);
    Pack<T, kVector> residual{}, result;
    if (params.residual) residual = *reinterpret_cast<const Pack<T, kVector>*>(params.residual + at);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const A scale = params.gamma ? params.gamma[kChannelsLast ? c + k : c] : A(1);
      result.values[k] =
          static_cast<T>(static_cast<A>(residual.values[k]) + static_cast<A>(branch.values[k]) * scale * kept);
    }
    *reinterpret_cast<Pack<T, kVector>*>(params.out + at) = result;
  }
};

// Calls f(work) with the widest LayerScale that fits.
template <typename T, typename A, typename F>
void with_layer_scale(const LayerScaleParams<T, A>& params, bool channels_last, const F& f) {
  constexpr int kWide = 16 / sizeof(T);
  const bool wide = aligned(channels_last ? params.channels : params.inner, kWide,
                            {params.residual, params.branch, static_cast<const T*>(params.out)});
  if (channels_last) {
    wide ? f(LayerScale<T, A, kWide, true>{params}) : f(LayerScale<T, A, 1, true>{params});
  } else {
    wide ? f(LayerScale<T, A, kWide, false>{params}) : f(LayerScale<T, A, 1, false>{params});
  }
}

// Elements [begin, end), both multiples of 16 or the end of the tensor.
template <typename T, typename A>
void layer_scale_cpu(const LayerScaleParams<T, A>& params, bool channels_last, int64_t begin, int64_t end);

}  // namespace torchtp::kernels
