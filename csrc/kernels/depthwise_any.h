#pragma once

#include "kernels/depthwise.h"

namespace torchtp::kernels {

// Any kernel, stride and dilation: one output element from memory as it lies.
template <typename T>
struct DepthwiseElement {
  int64_t batch;
  int32_t c, y, x;

  // Element `index` of the regions, in the order of memory.
  static TORCHTP_HOST_DEVICE DepthwiseElement find(int64_t index, const Regions& regions, int32_t channels,
                                                   bool channels_last) {
    DepthwiseElement found{};
    const int64_t area = regions.first.area() + regions.second.area();
    int64_t pixel, rest;
    if (channels_last) {
      found.c = static_cast<int32_t>(index % channels);
      pixel = index / channels % area;
      found.batch = index / channels / area;
    } else {
      pixel = index % area;
      rest = index / area;
      found.c = static_cast<int32_t>(rest % channels);
      found.batch = rest / channels;
    }
    const bool second = pixel >= regions.first.area();
    if (second) pixel -= regions.first.area();
    const Region& region = second ? regions.second : regions.first;
    found.y = region.y0 + static_cast<int32_t>(pixel / region.width());
    found.x = region.x0 + static_cast<int32_t>(pixel % region.width());
    return found;
  }
};

template <typename T, bool kChannelsLast>
TORCHTP_HOST_DEVICE float halo_at(const HaloPlanes<T>& in, int64_t n, int32_t c, int32_t y, int32_t x) {
  return kChannelsLast ? in.template at<true>(n, c, y, x) : in.template at<false>(n * in.channels + c, 0, y, x);
}

template <typename T, bool kChannelsLast>
TORCHTP_HOST_DEVICE int64_t dense_index(int32_t channels, int32_t height, int32_t width, int64_t n, int32_t c,
                                        int32_t y, int32_t x) {
  return kChannelsLast ? ((n * height + y) * width + x) * channels + c : ((n * channels + c) * height + y) * width + x;
}

template <typename T, bool kChannelsLast>
struct DepthwiseAny {
  HaloPlanes<T> in;
  const T* weight;
  const T* bias;
  T* out;
  DepthwiseParams params;
  Regions regions;

  int64_t total() const { return params.batches * params.channels * regions.area(); }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const auto [n, c, y, x] = DepthwiseElement<T>::find(index, regions, params.channels, kChannelsLast);
    const int32_t taps = params.y.kernel * params.x.kernel;
    const T* const filter = weight + int64_t{c} * taps;
    float sum = bias ? static_cast<float>(bias[c]) : 0.0f;
    for (int32_t ky = 0; ky < params.y.kernel; ++ky) {
      const int32_t row = y * params.y.stride + ky * params.y.dilation - params.y.offset;
      for (int32_t kx = 0; kx < params.x.kernel; ++kx) {
        const int32_t column = x * params.x.stride + kx * params.x.dilation - params.x.offset;
        const int32_t tap = ky * params.x.kernel + kx;
        sum += halo_at<T, kChannelsLast>(in, n, c, row, column) * static_cast<float>(filter[tap]);
      }
    }
    out[dense_index<T, kChannelsLast>(params.channels, params.out_height, params.out_width, n, c, y, x)] =
        static_cast<T>(sum);
  }
};

// The gradient of the input for any stride: input i was read by outputs (i + offset - dilation * k) / stride.
template <typename T, bool kChannelsLast>
struct DepthwiseAnyInputGrad {
  HaloPlanes<T> grad_out;
  const T* weight;
  T* grad_in;
  DepthwiseParams params;
  Regions regions;

  int64_t total() const { return params.batches * params.channels * regions.area(); }
  TORCHTP_HOST_DEVICE void operator()(int64_t index) const {
    const auto [n, c, y, x] = DepthwiseElement<T>::find(index, regions, params.channels, kChannelsLast);
    const T* const filter = weight + int64_t{c} * params.y.kernel * params.x.kernel;
    float sum = 0;
    for (int32_t ky = 0; ky < params.y.kernel; ++ky) {
      const int32_t down = y + params.y.offset - ky * params.y.dilation;
      if (down % params.y.stride != 0) continue;
      for (int32_t kx = 0; kx < params.x.kernel; ++kx) {
        const int32_t across = x + params.x.offset - kx * params.x.dilation;
        if (across % params.x.stride != 0) continue;
        sum += halo_at<T, kChannelsLast>(grad_out, n, c, down / params.y.stride, across / params.x.stride) *
               static_cast<float>(filter[ky * params.x.kernel + kx]);
      }
    }
    grad_in[dense_index<T, kChannelsLast>(params.channels, params.in_height, params.in_width, n, c, y, x)] =
        static_cast<T>(sum);
  }
};

}  // namespace torchtp::kernels
