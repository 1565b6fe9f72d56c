#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/host_device.h"
#include "kernels/divider.h"
#include "kernels/max_pool.h"
#include "kernels/vectors.h"

// Max pooling element by element, for the device: a row's gradient is gathered from the windows that read it, so the
// bits are the same on every run.
namespace torchtp::kernels {

// indices[i] = to_global(indices[i]).
template <typename Int>
struct MaxPoolToGlobal {
  int64_t* indices;
  PoolIndex index;
  int64_t count;

  int64_t total() const { return count; }
  TORCHTP_HOST_DEVICE void operator()(int64_t i) const { indices[i] = index.to_global<Int>(indices[i]); }
};

// Element `at` of an array of `places` a plane: which place it is, and where its plane begins in an array of `others` a
// plane, whose neighbours lie `step` apart.
template <typename Division>
struct PlanePlace {
  Division by_places, by_channels;
  int64_t channels, others, step;
  bool channels_last;

  PlanePlace(const MaxPoolParams& params, int64_t places, int64_t others)
      : by_places(places),
        by_channels(params.channels),
        channels(params.channels),
        others(others),
        step(params.channels_last ? params.channels : 1),
        channels_last(params.channels_last) {}

  TORCHTP_HOST_DEVICE int64_t place(int64_t at, int64_t& first) const {
    int64_t channel = 0;
    if (channels_last) {
      const int64_t pixel = by_channels.quotient(at);
      channel = at - pixel * channels;
      at = pixel;
    }
    const int64_t plane = by_places.quotient(at);
    first = plane * others * step + channel;
    return at - plane * by_places.divisor;
  }
};

// out[i] = frame at indices[i] (global). Int holds a plane's indices.
template <typename T, typename Division, typename Int>
struct MaxPoolGather {
  const T* frame;
  const int64_t* indices;
  T* out;
  MaxPoolParams params;
  PlanePlace<Division> places{params, params.outputs, params.inputs};

  int64_t total() const { return params.batches * params.channels * params.outputs; }
  TORCHTP_HOST_DEVICE void operator()(int64_t i) const {
    int64_t first = 0;
    places.place(i, first);
    out[i] = frame[first + params.index.to_frame<Int>(indices[i]) * places.step];
  }
};

// By one instruction for certain: the compiler takes what it selected number by number apart again.
template <typename Elements>
TORCHTP_HOST_DEVICE void store_at_once(Elements* to, const Elements& elements) {
#ifdef __CUDA_ARCH__
  const size_t at = __cvta_generic_to_global(to);
  if constexpr (sizeof(Elements) == 16) {
    uint4 words;
    memcpy(&words, &elements, sizeof(words));
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w)
                 : "memory");
    return;
  } else if constexpr (sizeof(Elements) == 8) {
    uint2 words;
    memcpy(&words, &elements, sizeof(words));
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(words.x), "r"(words.y) : "memory");
    return;
  } else if constexpr (sizeof(Elements) == 4) {
    uint32_t word;
    memcpy(&word, &elements, sizeof(word));
    asm volatile("st.global.b32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
    return;
  }
#endif
  *to = elements;
}

// grad_frame[i] = the sum of grad_output over the windows whose maximum it is, in their order; every element is
// written, in G. An item is kPixels neighbouring elements of a row, of kVector channels where those lie innermost: it
// asks each window that reads one of them where its maximum is. Sums in A.
template <typename T, typename G, int kVector, typename Division>
struct MaxPoolBackward {
  using Int = decltype(Division::divisor);
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  static constexpr int kPixels = 8;
  // Windows of a row whose numbers are on their way at once: as many as read eight elements at 3x3 and a stride of 2.
  static constexpr int kAhead = sizeof(Int) == 4 ? 5 : 1;

  const T* grad_output;
  const int64_t* indices;  // global
  G* grad_frame;
  Int frame[3], global[3], begin[3];
  Int outputs[3], stride[3], padding[3], reach[3];  // reach: from a window's first row to its last one
  Int step;                                         // from one element of a plane to the next
  int64_t in_plane, out_plane, items;
  bool whole;  // an item's elements may be written at once
  Division by_vectors, by_groups, by_rows, by_planes, by_stride[3];

  MaxPoolBackward(const T* grad_output, const int64_t* indices, G* grad_frame, const MaxPoolParams& params)
      : grad_output(grad_output),
        indices(indices),
        grad_frame(grad_frame),
        step(static_cast<Int>(params.channels_last ? params.channels : 1)),
        in_plane(params.inputs * step),
        out_plane(params.outputs * step),
        whole(step == 1 && params.index.frame[2] % kPixels == 0) {
    const int64_t planes = params.batches * (params.channels_last ? 1 : params.channels);
    const int64_t vectors = params.channels_last ? params.channels / kVector : 1;
    const int64_t groups = (params.index.frame[2] + kPixels - 1) / kPixels;
    items = planes * params.index.frame[0] * params.index.frame[1] * groups * vectors;
    by_vectors = Division(vectors);
    by_groups = Division(groups);
    by_rows = Division(params.index.frame[1]);
    by_planes = Division(params.index.frame[0]);
    for (int dim = 0; dim < 3; ++dim) {
      frame[dim] = static_cast<Int>(params.index.frame[dim]);
      global[dim] = static_cast<Int>(params.index.global[dim]);
      begin[dim] = static_cast<Int>(params.index.begin[dim]);
      outputs[dim] = static_cast<Int>(params.windows.outputs[dim]);
      stride[dim] = static_cast<Int>(params.windows.stride[dim]);
      padding[dim] = static_cast<Int>(params.windows.padding[dim]);
      reach[dim] = static_cast<Int>((params.windows.kernel[dim] - 1) * params.index.dilation[dim]);
      by_stride[dim] = Division(params.windows.stride[dim]);
    }
  }

  int64_t total() const { return items; }

  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const auto item = static_cast<Int>(index);
    const Int group = by_vectors.quotient(item), row = by_groups.quotient(group), above = by_rows.quotient(row),
              plane = by_planes.quotient(above);
    const Int z = above - plane * by_planes.divisor, y = row - above * by_rows.divisor,
              x = (group - row * by_groups.divisor) * kPixels;
    const int64_t vector = int64_t{item - group * by_vectors.divisor} * kVector;
    A sums[kPixels][kVector] = {};
    // Padding may lie in the frame: nothing is read there, and its places have no index.
    if (inside(0, z) && inside(1, y)) {
      const Int mine = ((z + begin[0]) * global[1] + y + begin[1]) * global[2] + x + begin[2];
      const int64_t from = plane * out_plane + vector;
      const Int last_c = last_reader(2, x + kPixels - 1), last_b = last_reader(1, y);
      for (Int a = first_reader(0, z); a <= last_reader(0, z); ++a) {
        for (Int b = first_reader(1, y); b <= last_b; ++b) {
          const int64_t line = from + int64_t{(a * outputs[1] + b) * outputs[2]} * step;
#pragma unroll 1
          for (Int c = first_reader(2, x); c <= last_c; c += kAhead) {
            Asked asked[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
              if (i == 0 || c + i <= last_c) asked[i].load(*this, line + int64_t{c + i} * step, mine);
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) asked[i].add_to(sums);
          }
        }
      }
    }
    const int64_t to = plane * in_plane + vector + int64_t{(z * frame[1] + y) * frame[2] + x} * step;
    if (!inside(2, x) || !inside(2, x + kPixels - 1)) {
#pragma unroll
      for (int p = 0; p < kPixels; ++p) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) sums[p][v] = inside(2, x + p) ? sums[p][v] : A(0);
      }
    }
    if constexpr (kVector == 1) {
      if (whole) {
        A row[kPixels];
#pragma unroll
        for (int p = 0; p < kPixels; ++p) row[p] = sums[p][0];
        return store(to, row);
      }
    }
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      if (x + p < frame[2]) store(to + int64_t{p} * step, sums[p]);
    }
  }

 private:
  TORCHTP_HOST_DEVICE bool inside(int dim, Int row) const {
    return row + begin[dim] >= 0 && row + begin[dim] < global[dim];
  }
  // The windows that reach a row: some of these, where they are dilated.
  TORCHTP_HOST_DEVICE Int first_reader(int dim, Int row) const {
    const Int behind = row + padding[dim] - reach[dim] + stride[dim] - 1;
    return behind > 0 ? by_stride[dim].quotient(behind) : 0;
  }
  TORCHTP_HOST_DEVICE Int last_reader(int dim, Int row) const {
    const Int window = by_stride[dim].quotient(row + padding[dim]);
    return window < outputs[dim] ? window : outputs[dim] - 1;
  }

  // A window's gradients, and how far behind the item's first element its maxima are.
  struct Asked {
    A grads[kVector] = {};
    Int places[kVector];

    TORCHTP_HOST_DEVICE Asked() {
#pragma unroll
      for (int v = 0; v < kVector; ++v) places[v] = -1;
    }
    TORCHTP_HOST_DEVICE void load(const MaxPoolBackward& work, int64_t at, Int mine) {
      constexpr int kPairs = kVector > 1 ? 2 : 1;  // indices of one load
      const auto pack = load_pack(reinterpret_cast<const Pack<T, kVector>*>(work.grad_output + at));
#pragma unroll
      for (int v = 0; v < kVector; v += kPairs) {
        const auto pair = load_pack(reinterpret_cast<const Pack<int64_t, kPairs>*>(work.indices + at + v));
#pragma unroll
        for (int i = 0; i < kPairs; ++i) places[v + i] = static_cast<Int>(pair.values[i]) - mine;
      }
      if constexpr (std::is_same_v<A, float>) {
        const Vector<kVector> wide = widened(pack);
#pragma unroll
        for (int v = 0; v < kVector; ++v) grads[v] = wide.values[v];
      } else {
#pragma unroll
        for (int v = 0; v < kVector; ++v) grads[v] = pack.values[v];
      }
    }
    TORCHTP_HOST_DEVICE void add_to(A (&sums)[kPixels][kVector]) const {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
#pragma unroll
        for (int p = 0; p < kPixels; ++p) sums[p][v] = places[v] == p ? sums[p][v] + grads[v] : sums[p][v];
      }
    }
  };

  template <int kCount>
  TORCHTP_HOST_DEVICE void store(int64_t to, const A (&sums)[kCount]) const {
    constexpr int kMost = 16 / sizeof(G), kOnce = kCount < kMost ? kCount : kMost;
#pragma unroll
    for (int v = 0; v < kCount; v += kOnce) {
      Pack<G, kOnce> result;
#pragma unroll
      for (int i = 0; i < kOnce; ++i) result.values[i] = static_cast<G>(sums[v + i]);
      store_at_once(reinterpret_cast<Pack<G, kOnce>*>(grad_frame + to + v), result);
    }
  }
};

inline int64_t most_elements(const MaxPoolParams& params) {
  return params.batches * params.channels * std::max(params.inputs, params.outputs);
}

// What MaxPoolBackward counts to beside elements: global places, and rows behind a plane with its padding.
inline int64_t most_taps(const MaxPoolParams& params) {
  int64_t places = 1, rows = 0;
  for (int dim = 0; dim < 3; ++dim) {
    places *= params.index.global[dim] + params.index.frame[dim];
    rows = std::max(rows, params.index.frame[dim] + params.windows.padding[dim] + params.windows.stride[dim] + 4);
  }
  return std::max(places, rows);
}

// See run_on_host.h for Run.
template <typename Run>
void run_max_pool_to_global(const Run& run, int64_t* indices, const PoolIndex& index, int64_t count) {
  with_index_type(index.frame, [&](auto zero) { run.each(MaxPoolToGlobal<decltype(zero)>{indices, index, count}); });
}

template <typename T, typename Run>
void run_max_pool_gather(const Run& run, const T* frame, const int64_t* indices, T* out, const MaxPoolParams& params) {
  with_division(most_elements(params), [&](auto division) {
    with_index_type(params.index.global, [&](auto zero) {
      run.each(MaxPoolGather<T, decltype(division), decltype(zero)>{frame, indices, out, params});
    });
  });
}

// grad_frame is aligned as new memory is.
template <typename T, typename G, typename Run>
void run_max_pool_backward(const Run& run, const T* grad_output, const int64_t* indices, G* grad_frame,
                           const MaxPoolParams& params) {
  constexpr int kWide = 2;  // indices of one load
  const bool wide = params.channels_last && aligned(params.channels, kWide, {grad_output}) &&
                    aligned(params.channels, kWide, {indices});
  with_division(std::max(most_elements(params), most_taps(params)), [&](auto division) {
    using Division = decltype(division);
    const auto go = [&](auto vector) {
      run.each(MaxPoolBackward<T, G, decltype(vector)::value, Division>(grad_output, indices, grad_frame, params));
    };
    if constexpr (std::is_same_v<Division, Divider>) {
      if (wide) return go(std::integral_constant<int, kWide>());
    }
    go(std::integral_constant<int, 1>());
  });
}

}  // namespace torchtp::kernels
