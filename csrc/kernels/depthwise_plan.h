#pragma once

#include "kernels/depthwise_band.h"
#include "kernels/depthwise_known.h"
#include "kernels/depthwise_pixels.h"
#include "kernels/depthwise_rows.h"
#include "kernels/depthwise_tile.h"
#include "kernels/depthwise_wide.h"

// Which program computes what; the same choice on the CPU and on the device, which differ in `Run`:
// run.program(program).
namespace torchtp::kernels {

template <bool kChannelsLast, typename T, typename Run>
void run_depthwise(const Run& run, const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                   const DepthwiseParams& params, const Regions& regions) {
  const auto band = [&](auto kernel, auto) {
    if constexpr (sizeof(T) == 2) {
      using Band = DepthwiseBand<T, decltype(kernel)::value, kChannelsLast>;
      run.program(Band::make(in, weight, bias, out, params, regions, false, run.most_shared));
    }
  };
  if (with_band<T>(params, band)) return;
  const auto tile = [&](auto kernel, auto stride) {
    constexpr int kKernel = decltype(kernel)::value, kStride = decltype(stride)::value;
    if constexpr (kChannelsLast && kKernel <= kMostPixelsKernel) {
      using Pixels = DepthwisePixels<T, kKernel, kStride, false>;
      return run.program(Pixels::make(in, weight, bias, out, params, regions, false));
    } else {
      if constexpr (!kChannelsLast && kStride == 2 && kKernel <= kMostRowsKernel) {
        using Rows = DepthwiseRows<T, kKernel>;
        if (Rows::fits(in, params, regions)) return run.program(Rows::make(in, weight, bias, out, params, regions));
      }
      using Tile = DepthwiseTile<T, kKernel, kStride, false, kChannelsLast>;
      run.program(Tile::make(in, weight, bias, out, params, regions, false, run.most_shared));
    }
  };
  if (with_known_kernel<1>(params, tile) || with_known_kernel<2>(params, tile)) return;
  using Wide = DepthwiseWide<T, kChannelsLast>;
  run.program(Wide::make(in, weight, bias, out, params, regions, false, run.most_shared));
}

template <bool kChannelsLast, typename T, typename Run>
void run_depthwise_input_grad(const Run& run, const HaloPlanes<T>& grad_out, const T* weight, T* grad_in,
                              const DepthwiseParams& params, const Regions& regions) {
  const T* const no_bias = nullptr;
  const auto band = [&](auto kernel, auto) {
    if constexpr (sizeof(T) == 2) {
      using Band = DepthwiseBand<T, decltype(kernel)::value, kChannelsLast>;
      run.program(Band::make(grad_out, weight, no_bias, grad_in, input_grad_as_forward(params), regions, true,
                             run.most_shared));
    }
  };
  if (with_band<T>(params, band)) return;
  const auto tile = [&](auto kernel, auto stride) {
    constexpr int kKernel = decltype(kernel)::value, kStride = decltype(stride)::value;
    const DepthwiseParams back = kStride == 1 ? input_grad_as_forward(params) : with_extents_swapped(params);
    if constexpr (kChannelsLast && kKernel <= kMostPixelsKernel) {
      using Pixels = DepthwisePixels<T, kKernel, kStride, kStride != 1>;
      run.program(Pixels::make(grad_out, weight, no_bias, grad_in, back, regions, kStride == 1));
    } else {
      using Tile = DepthwiseTile<T, kKernel, kStride, kStride != 1, kChannelsLast>;
      run.program(Tile::make(grad_out, weight, no_bias, grad_in, back, regions, kStride == 1, run.most_shared));
    }
  };
  if (with_known_kernel<1>(params, tile) || with_known_kernel<2>(params, tile)) return;
  using Wide = DepthwiseWide<T, kChannelsLast>;
  run.program(Wide::make(grad_out, weight, no_bias, grad_in, params, regions, true, run.most_shared));
}

// Calls launch(planes, regions) for all that a part has to compute. The interior is computed while halos are on their
// way: its tiles overhang it, but may not look at them.
template <typename T, typename Launch>
void for_each_region(HaloPlanes<T> planes, const DepthwiseParams& params, Part part, bool input_grad,
                     const Launch& launch) {
  const std::array<Regions, 2> all = depthwise_regions(params, planes, part, input_grad);
  if (part == Part::kInterior) planes.rows_above = planes.rows_below = planes.columns_left = planes.columns_right = 0;
  for (const Regions& regions : all) {
    if (params.batches * params.channels * regions.area() > 0) launch(planes, regions);
  }
}

template <typename T, typename Run>
void run_depthwise(const Run& run, const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                   const DepthwiseParams& params, Part part) {
  for_each_region(in, params, part, false, [&](const HaloPlanes<T>& seen, const Regions& regions) {
    if (params.channels_last) {
      run_depthwise<true>(run, seen, weight, bias, out, params, regions);
    } else {
      run_depthwise<false>(run, seen, weight, bias, out, params, regions);
    }
  });
}

template <typename T, typename Run>
void run_depthwise_input_grad(const Run& run, const HaloPlanes<T>& grad_out, const T* weight, T* grad_in,
                              const DepthwiseParams& params, Part part) {
  for_each_region(grad_out, params, part, true, [&](const HaloPlanes<T>& seen, const Regions& regions) {
    if (params.channels_last) {
      run_depthwise_input_grad<true>(run, seen, weight, grad_in, params, regions);
    } else {
      run_depthwise_input_grad<false>(run, seen, weight, grad_in, params, regions);
    }
  });
}

}  // namespace torchtp::kernels
