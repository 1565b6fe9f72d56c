#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/norm.h"

namespace torchtp::kernels {
namespace {

template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Elements summed in A before the sum goes on in double; they are read twice while they lie in the first-level cache.
constexpr int64_t kBlock = 2048;

}  // namespace

template <typename T>
void norm_moments_planes_cpu(const T* x, const NormShape& shape, double* mean, double* m2, int64_t begin, int64_t end) {
  using A = Acc<T>;
  for (int64_t plane = begin; plane < end; ++plane) {
    double so_far = 0, squares = 0;
    for (int64_t first = 0; first < shape.inner; first += kBlock) {
      const T* block = x + plane * shape.inner + first;
      const int64_t n = std::min(kBlock, shape.inner - first);
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; ++i) sum += static_cast<A>(block[i]);
      const A center = sum / static_cast<A>(n);
      A spread = 0;
#pragma omp simd reduction(+ : spread)
      for (int64_t i = 0; i < n; ++i) {
        const A off = static_cast<A>(block[i]) - center;
        spread += off * off;
      }
      norm_merge<double>(static_cast<double>(first), static_cast<double>(n), center, spread, so_far, squares);
    }
    mean[plane] = so_far;
    m2[plane] = squares;
  }
}

template <typename T>
void norm_moments_rows_cpu(const T* x, const NormShape& shape, double* mean, double* m2, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const int64_t channels = shape.channels, rows = std::max<int64_t>(16, 4 * kBlock / std::max<int64_t>(1, channels));
  std::vector<A> center(channels), spread(channels);
  std::fill(mean, mean + channels, 0.0);
  std::fill(m2, m2 + channels, 0.0);
  for (int64_t first = begin; first < end; first += rows) {
    const int64_t last = std::min(end, first + rows);
    const A each = A(1) / static_cast<A>(last - first);
    std::fill(center.begin(), center.end(), A(0));
    std::fill(spread.begin(), spread.end(), A(0));
    A* const middle = center.data();
    A* const off = spread.data();
    for (int64_t row = first; row < last; ++row) {
      const T* in = x + row * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) middle[c] += static_cast<A>(in[c]);
    }
    for (int64_t c = 0; c < channels; ++c) middle[c] *= each;
    for (int64_t row = first; row < last; ++row) {
      const T* in = x + row * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        const A difference = static_cast<A>(in[c]) - middle[c];
        off[c] += difference * difference;
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      norm_merge<double>(static_cast<double>(first - begin), static_cast<double>(last - first), middle[c], off[c],
                         mean[c], m2[c]);
    }
  }
}

template <typename T, typename A>
void norm_dots_planes_cpu(const T* dy, const T* x, const A* center, const NormShape& shape, double* sum, double* dot,
                          int64_t begin, int64_t end) {
  for (int64_t plane = begin; plane < end; ++plane) {
    const A middle = center[plane / shape.channels * shape.batch_stride + plane % shape.channels];
    double all = 0, product = 0;
    for (int64_t first = 0; first < shape.inner; first += kBlock) {
      const T* g = dy + plane * shape.inner + first;
      const T* in = x + plane * shape.inner + first;
      const int64_t n = std::min(kBlock, shape.inner - first);
      A s = 0, d = 0;
#pragma omp simd reduction(+ : s, d)
      for (int64_t i = 0; i < n; ++i) {
        const A value = static_cast<A>(g[i]);
        s += value;
        d += value * (static_cast<A>(in[i]) - middle);
      }
      all += s;
      product += d;
    }
    sum[plane] = all;
    dot[plane] = product;
  }
}

template <typename T, typename A>
void norm_dots_rows_cpu(const T* dy, const T* x, const A* center, const NormShape& shape, double* sum, double* dot,
                        int64_t begin, int64_t end) {
  const int64_t channels = shape.channels, rows = std::max<int64_t>(16, 4 * kBlock / std::max<int64_t>(1, channels));
  std::vector<A> sums(channels), dots(channels);
  std::fill(sum, sum + channels, 0.0);
  std::fill(dot, dot + channels, 0.0);
  for (int64_t first = begin; first < end; first += rows) {
    std::fill(sums.begin(), sums.end(), A(0));
    std::fill(dots.begin(), dots.end(), A(0));
    A* const s = sums.data();
    A* const d = dots.data();
    for (int64_t row = first; row < std::min(end, first + rows); ++row) {
      const T* g = dy + row * channels;
      const T* in = x + row * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) {
        const A value = static_cast<A>(g[c]);
        s[c] += value;
        d[c] += value * (static_cast<A>(in[c]) - center[c]);
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      sum[c] += s[c];
      dot[c] += d[c];
    }
  }
}

template <typename T, typename A>
void norm_affine_cpu(const T* x, T* y, const A* center, const A* scale, const A* shift, const NormShape& shape,
                     bool channels_last, int64_t begin, int64_t end) {
  for (int64_t unit = begin; unit < end; ++unit) {
    if (channels_last) {
      const int64_t at = unit / shape.inner * shape.batch_stride, place = unit * shape.channels;
#pragma omp simd
      for (int64_t c = 0; c < shape.channels; ++c) {
        y[place + c] =
            static_cast<T>(norm_apply(static_cast<A>(x[place + c]), center[at + c], scale[at + c], shift[at + c]));
      }
    } else {
      const int64_t at = unit / shape.channels * shape.batch_stride + unit % shape.channels, place = unit * shape.inner;
      const A middle = center[at], factor = scale[at], offset = shift[at];
#pragma omp simd
      for (int64_t i = 0; i < shape.inner; ++i) {
        y[place + i] = static_cast<T>(norm_apply(static_cast<A>(x[place + i]), middle, factor, offset));
      }
    }
  }
}

template <typename T, typename A>
void norm_combine_cpu(const T* dy, const T* x, T* dx, const A* center, const A* on_dy, const A* on_x, const A* shift,
                      const NormShape& shape, bool channels_last, int64_t begin, int64_t end) {
  for (int64_t unit = begin; unit < end; ++unit) {
    if (channels_last) {
      const int64_t at = unit / shape.inner * shape.batch_stride, place = unit * shape.channels;
#pragma omp simd
      for (int64_t c = 0; c < shape.channels; ++c) {
        dx[place + c] = static_cast<T>(norm_grad(static_cast<A>(dy[place + c]), static_cast<A>(x[place + c]),
                                                 center[at + c], on_dy[at + c], on_x[at + c], shift[at + c]));
      }
    } else {
      const int64_t at = unit / shape.channels * shape.batch_stride + unit % shape.channels, place = unit * shape.inner;
      const A middle = center[at], a = on_dy[at], b = on_x[at], offset = shift[at];
#pragma omp simd
      for (int64_t i = 0; i < shape.inner; ++i) {
        dx[place + i] = static_cast<T>(
            norm_grad(static_cast<A>(dy[place + i]), static_cast<A>(x[place + i]), middle, a, b, offset));
      }
    }
  }
}

#define TORCHTP_NORM(T, A)                                                                                             \
  template void norm_moments_planes_cpu(const T*, const NormShape&, double*, double*, int64_t, int64_t);               \
  template void norm_moments_rows_cpu(const T*, const NormShape&, double*, double*, int64_t, int64_t);                 \
  template void norm_dots_planes_cpu(const T*, const T*, const A*, const NormShape&, double*, double*, int64_t,        \
                                     int64_t);                                                                         \
  template void norm_dots_rows_cpu(const T*, const T*, const A*, const NormShape&, double*, double*, int64_t,          \
                                   int64_t);                                                                           \
  template void norm_affine_cpu(const T*, T*, const A*, const A*, const A*, const NormShape&, bool, int64_t, int64_t); \
  template void norm_combine_cpu(const T*, const T*, T*, const A*, const A*, const A*, const A*, const NormShape&,     \
                                 bool, int64_t, int64_t);
TORCHTP_NORM(float, float)
TORCHTP_NORM(double, double)
TORCHTP_NORM(c10::BFloat16, float)
TORCHTP_NORM(c10::Half, float)
#undef TORCHTP_NORM

}  // namespace torchtp::kernels
