#pragma once

#include "kernels/depthwise_any.h"
#include "kernels/depthwise_known.h"
#include "kernels/depthwise_tile.h"
#include "kernels/depthwise_wide.h"

// Which program computes what; the same choice on the CPU and on the device, which differ in `Run`:
// run.program(program) and run.each(work), where work has total() and operator()(index).
namespace torchtp::kernels {

template <bool kChannelsLast, typename T, typename Run>
void run_depthwise(const Run& run, const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                   const DepthwiseParams& params, const Regions& regions, bool mirrored) {
  const auto tile = [&](auto kernel, auto stride) {
    using Tile = DepthwiseTile<T, decltype(kernel)::value, decltype(stride)::value, false, kChannelsLast>;
    run.program(Tile::make(in, weight, bias, out, params, regions, mirrored, run.most_shared));
  };
  if (with_known_kernel<1>(params, tile) || with_known_kernel<2>(params, tile)) return;
  if (params.y.stride == 1 && params.x.stride == 1) {
    run.program(
        DepthwiseWide<T, kChannelsLast>::make(in, weight, bias, out, params, regions, mirrored, run.most_shared));
  } else {
    run.each(DepthwiseAny<T, kChannelsLast>{in, weight, bias, out, params, regions});
  }
}

// The interior is computed while halos are on their way: its tiles overhang it, but may not look at them.
template <typename T>
HaloPlanes<T> seen_by(Part part, HaloPlanes<T> planes) {
  if (part == Part::kInterior) planes.rows_above = planes.rows_below = planes.columns_left = planes.columns_right = 0;
  return planes;
}

template <typename T, typename Run>
void run_depthwise(const Run& run, const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                   const DepthwiseParams& params, Part part, bool mirrored) {
  const HaloPlanes<T> seen = seen_by(part, in);
  for (const Regions& regions : depthwise_regions(params, in, part, false)) {
    if (params.batches * params.channels * regions.area() == 0) continue;
    if (params.channels_last) {
      run_depthwise<true>(run, seen, weight, bias, out, params, regions, mirrored);
    } else {
      run_depthwise<false>(run, seen, weight, bias, out, params, regions, mirrored);
    }
  }
}

// For a stride that is not 1.
template <bool kChannelsLast, typename T, typename Run>
void run_depthwise_input_grad(const Run& run, const HaloPlanes<T>& grad_out, const T* weight, T* grad_in,
                              const DepthwiseParams& params, const Regions& regions) {
  const auto tile = [&](auto kernel, auto stride) {
    using Tile = DepthwiseTile<T, decltype(kernel)::value, decltype(stride)::value, true, kChannelsLast>;
    const T* const no_bias = nullptr;
    run.program(
        Tile::make(grad_out, weight, no_bias, grad_in, with_extents_swapped(params), regions, false, run.most_shared));
  };
  if (with_known_kernel<2>(params, tile)) return;
  run.each(DepthwiseAnyInputGrad<T, kChannelsLast>{grad_out, weight, grad_in, params, regions});
}

template <typename T, typename Run>
void run_depthwise_input_grad(const Run& run, const HaloPlanes<T>& grad_out, const T* weight, T* grad_in,
                              const DepthwiseParams& params, Part part) {
  if (params.y.stride == 1 && params.x.stride == 1) {
    const T* const no_bias = nullptr;
    run_depthwise(run, grad_out, weight, no_bias, grad_in, input_grad_as_forward(params), part, true);
    return;
  }
  const HaloPlanes<T> seen = seen_by(part, grad_out);
  for (const Regions& regions : depthwise_regions(params, grad_out, part, true)) {
    if (params.batches * params.channels * regions.area() == 0) continue;
    if (params.channels_last) {
      run_depthwise_input_grad<true>(run, seen, weight, grad_in, params, regions);
    } else {
      run_depthwise_input_grad<false>(run, seen, weight, grad_in, params, regions);
    }
  }
}

}  // namespace torchtp::kernels
