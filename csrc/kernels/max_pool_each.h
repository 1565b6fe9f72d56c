#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.h"
#include "kernels/divider.h"
#include "kernels/max_pool.h"

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

// grad_frame[i] = the sum of grad_output over the windows whose maximum it is; every element is written. Sums in A.
template <typename T, typename A, typename Division>
struct MaxPoolBackward {
  const T* grad_output;
  const int64_t* indices;  // global
  A* grad_frame;
  MaxPoolParams params;
  PlanePlace<Division> places{params, params.inputs, params.outputs};
  Division by_columns{params.index.frame[2]}, by_rows{params.index.frame[1]};
  Division by_stride[3] = {Division(params.windows.stride[0]), Division(params.windows.stride[1]),
                           Division(params.windows.stride[2])};

  int64_t total() const { return params.batches * params.channels * params.inputs; }

  TORCHTP_HOST_DEVICE void operator()(int64_t i) const {
    int64_t first = 0, row[3];
    const int64_t place = places.place(i, first), rest = by_columns.quotient(place);
    row[0] = by_rows.quotient(rest);
    row[1] = rest - row[0] * params.index.frame[1];
    row[2] = place - rest * params.index.frame[2];
    int64_t mine = 0;
    bool padding = false;
    for (int dim = 0; dim < 3; ++dim) {
      const int64_t global = row[dim] + params.index.begin[dim];
      padding |= global < 0 || global >= params.index.global[dim];
      mine = mine * params.index.global[dim] + global;
    }
    A sum = 0;
    if (!padding) {
      for (int64_t a = last(0, row[0]); reads(0, a, row[0]); --a)
        for (int64_t b = last(1, row[1]); reads(1, b, row[1]); --b)
          for (int64_t c = last(2, row[2]); reads(2, c, row[2]); --c) {
            const int64_t window = (a * params.windows.outputs[1] + b) * params.windows.outputs[2] + c;
            const int64_t at = first + window * places.step;
            if (indices[at] == mine) sum += static_cast<A>(grad_output[at]);
          }
    }
    grad_frame[i] = sum;
  }

 private:
  // The last window that begins at a row or above it.
  TORCHTP_HOST_DEVICE int64_t last(int dim, int64_t row) const {
    const int64_t window = by_stride[dim].quotient(row + params.windows.padding[dim]);
    return window < params.windows.outputs[dim] ? window : params.windows.outputs[dim] - 1;
  }
  // Whether a window from there on backwards reaches the row.
  TORCHTP_HOST_DEVICE bool reads(int dim, int64_t window, int64_t row) const {
    if (window < 0) return false;
    const int64_t distance = row + params.windows.padding[dim] - window * params.windows.stride[dim];
    return distance <= (params.windows.kernel[dim] - 1) * params.index.dilation[dim];
  }
};

inline int64_t most_elements(const MaxPoolParams& params) {
  return params.batches * params.channels * std::max(params.inputs, params.outputs);
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

template <typename T, typename A, typename Run>
void run_max_pool_backward(const Run& run, const T* grad_output, const int64_t* indices, A* grad_frame,
                           const MaxPoolParams& params) {
  with_division(most_elements(params), [&](auto division) {
    run.each(MaxPoolBackward<T, A, decltype(division)>{grad_output, indices, grad_frame, params});
  });
}

}  // namespace torchtp::kernels
