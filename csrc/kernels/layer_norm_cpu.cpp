#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <vector>

#include "kernels/layer_norm.h"

namespace torchtp::kernels {
namespace {

// Calls f(first element in x, first position in mean and rstd, number of positions) for each block.
template <typename F>
void for_each_block(const LayerNormParams& params, int64_t begin, int64_t end, const F& f) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t batch = block / params.blocks_per_batch();
    const int64_t first = block % params.blocks_per_batch() * params.block();
    f(batch * params.channels * params.inner + first, batch * params.inner + first,
      std::min(params.block(), params.inner - first));
  }
}

}  // namespace

template <typename T, typename A>
void layer_norm_channels_first_cpu(const T* x, const A* weight, const A* bias, double eps, T* y, A* mean, A* rstd,
                                   const LayerNormParams& params, int64_t begin, int64_t end) {
  const A each = A(1) / static_cast<A>(params.channels);
  std::vector<A> spread(params.block());
  A* const square = spread.data();
  for_each_block(params, begin, end, [&](int64_t place, int64_t position, int64_t n) {
    A* const middle = mean + position;
    A* const factor = rstd + position;
    std::fill(middle, middle + n, A(0));
    std::fill(square, square + n, A(0));
    for (int64_t c = 0; c < params.channels; ++c) {
      const T* in = x + place + c * params.inner;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) middle[i] += static_cast<A>(in[i]);
    }
    for (int64_t i = 0; i < n; ++i) middle[i] *= each;
    for (int64_t c = 0; c < params.channels; ++c) {
      const T* in = x + place + c * params.inner;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const A off = static_cast<A>(in[i]) - middle[i];
        square[i] += off * off;
      }
    }
    for (int64_t i = 0; i < n; ++i) factor[i] = layer_norm_rstd(square[i] * each, static_cast<A>(eps));
    for (int64_t c = 0; c < params.channels; ++c) {
      const T* in = x + place + c * params.inner;
      T* out = y + place + c * params.inner;
      const A w = weight ? weight[c] : A(1), b = bias ? bias[c] : A(0);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        out[i] = static_cast<T>(layer_norm_apply(static_cast<A>(in[i]), middle[i], factor[i], w, b));
      }
    }
  });
}

template <typename T, typename A>
void layer_norm_channels_first_backward_cpu(const T* dy, const T* x, const A* weight, const A* mean, const A* rstd,
                                            T* dx, double* grad_weight, double* grad_bias,
                                            const LayerNormParams& params, int64_t begin, int64_t end) {
  const A each = A(1) / static_cast<A>(params.channels);
  std::vector<A> sums(params.block()), dots(params.block());
  A* const sum = sums.data();
  A* const dot = dots.data();
  for_each_block(params, begin, end, [&](int64_t place, int64_t position, int64_t n) {
    const A* middle = mean + position;
    const A* factor = rstd + position;
    std::fill(sum, sum + n, A(0));
    std::fill(dot, dot + n, A(0));
    for (int64_t c = 0; c < params.channels; ++c) {
      const T* in = x + place + c * params.inner;
      const T* g = dy + place + c * params.inner;
      const A w = weight ? weight[c] : A(1);
      A dw = 0, db = 0;
#pragma omp simd reduction(+ : dw, db)
      for (int64_t i = 0; i < n; ++i) {
        const A grad = static_cast<A>(g[i]);
        const A product = grad * layer_norm_normed(static_cast<A>(in[i]), middle[i], factor[i]);
        dw += product;
        db += grad;
        sum[i] += grad * w;
        dot[i] += product * w;
      }
      if (grad_weight) grad_weight[c] += dw;
      if (grad_bias) grad_bias[c] += db;
    }
    if (!dx) return;
    for (int64_t i = 0; i < n; ++i) {
      sum[i] *= each;
      dot[i] *= each;
    }
    for (int64_t c = 0; c < params.channels; ++c) {
      const T* in = x + place + c * params.inner;
      const T* g = dy + place + c * params.inner;
      T* out = dx + place + c * params.inner;
      const A w = weight ? weight[c] : A(1);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const A normed = layer_norm_normed(static_cast<A>(in[i]), middle[i], factor[i]);
        out[i] = static_cast<T>(layer_norm_grad(static_cast<A>(g[i]) * w, normed, factor[i], sum[i], dot[i]));
      }
    }
  });
}

#define TORCHTP_LAYER_NORM(T, A)                                                                                      \
  template void layer_norm_channels_first_cpu(const T*, const A*, const A*, double, T*, A*, A*,                       \
                                              const LayerNormParams&, int64_t, int64_t);                              \
  template void layer_norm_channels_first_backward_cpu(const T*, const T*, const A*, const A*, const A*, T*, double*, \
                                                       double*, const LayerNormParams&, int64_t, int64_t);
TORCHTP_LAYER_NORM(float, float)
TORCHTP_LAYER_NORM(double, double)
TORCHTP_LAYER_NORM(c10::BFloat16, float)
TORCHTP_LAYER_NORM(c10::Half, float)
#undef TORCHTP_LAYER_NORM

}  // namespace torchtp::kernels
