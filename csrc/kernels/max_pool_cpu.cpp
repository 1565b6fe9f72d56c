#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "kernels/max_pool.h"

namespace torchtp::kernels {
namespace {

// Calls f(output element, frame's first element of that plane, distance of neighbours in the frame).
template <typename F>
void for_each_window(const MaxPoolParams& params, int64_t begin, int64_t end, const F& f) {
  if (!params.channels_last) {
    for (int64_t plane = begin; plane < end; ++plane) {
      for (int64_t o = 0; o < params.outputs; ++o) f(plane * params.outputs + o, plane * params.inputs, 1);
    }
    return;
  }
  // Planes of one batch side by side, so that a run of channels is read in order.
  for (int64_t plane = begin; plane < end;) {
    const int64_t batch = plane / params.channels;
    const int64_t stop = std::min(end, (batch + 1) * params.channels);
    const int64_t first = plane - batch * params.channels, last = stop - batch * params.channels;
    for (int64_t o = 0; o < params.outputs; ++o) {
      for (int64_t c = first; c < last; ++c) {
        f((batch * params.outputs + o) * params.channels + c, batch * params.inputs * params.channels + c,
          params.channels);
      }
    }
    plane = stop;
  }
}

}  // namespace

void max_pool_to_global_cpu(int64_t* indices, const PoolIndex& index, int64_t begin, int64_t end) {
  with_index_type(index.frame, [&](auto zero) {
    for (int64_t i = begin; i < end; ++i) indices[i] = index.to_global<decltype(zero)>(indices[i]);
  });
}

template <typename T, typename A>
int64_t max_pool_scatter_cpu(const T* grad_output, const int64_t* indices, A* grad_frame, const MaxPoolParams& params,
                             int64_t begin, int64_t end) {
  int64_t wrong = -1;
  with_index_type(params.index.global, [&](auto zero) {
    for_each_window(params, begin, end, [&](int64_t out, int64_t base, int64_t step) {
      const int64_t place = params.index.to_frame<decltype(zero)>(indices[out]);
      if (params.reaches<decltype(zero)>(indices[out], place)) {
        grad_frame[base + place * step] += static_cast<A>(grad_output[out]);
      } else {
        wrong = out;
      }
    });
  });
  return wrong;
}

template <typename T>
int64_t max_pool_gather_cpu(const T* frame, const int64_t* indices, T* out, const MaxPoolParams& params, int64_t begin,
                            int64_t end) {
  int64_t wrong = -1;
  with_index_type(params.index.global, [&](auto zero) {
    for_each_window(params, begin, end, [&](int64_t to, int64_t base, int64_t step) {
      const int64_t place = params.index.to_frame<decltype(zero)>(indices[to]);
      if (params.reaches<decltype(zero)>(indices[to], place)) {
        out[to] = frame[base + place * step];
      } else {
        wrong = to;
      }
    });
  });
  return wrong;
}

#define TORCHTP_MAX_POOL(T, A)                                                                                 \
  template int64_t max_pool_scatter_cpu(const T*, const int64_t*, A*, const MaxPoolParams&, int64_t, int64_t); \
  template int64_t max_pool_gather_cpu(const T*, const int64_t*, T*, const MaxPoolParams&, int64_t, int64_t);
TORCHTP_MAX_POOL(float, float)
TORCHTP_MAX_POOL(double, double)
TORCHTP_MAX_POOL(c10::BFloat16, float)
TORCHTP_MAX_POOL(c10::Half, float)
#undef TORCHTP_MAX_POOL

}  // namespace torchtp::kernels
