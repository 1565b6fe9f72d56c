#pragma once

#include "kernels/depthwise_any.h"
#include "kernels/depthwise_tile.h"
#include "kernels/depthwise_wide.h"

// Which program computes what; the same choice on the CPU and on the device, which differ in `Run`:
// run.program(program) and run.each(work), where work has total() and operator()(index).
namespace torchtp::kernels {

template <int kKernel, int kStride, bool kChannelsLast, typename T, typename Run, typename... Args>
void run_depthwise_tile(const Run& run, const HaloPlanes<T>& in, const Args&... args) {
  run.program(DepthwiseTile<T, kKernel, kStride, kChannelsLast>::make(in, args..., run.most_shared));
}

template <bool kChannelsLast, typename T, typename Run>
void run_depthwise(const Run& run, const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                   const DepthwiseParams& params, const Regions& regions, bool mirrored) {
  const auto is = [&](int32_t kernel, int32_t stride) {
    return params.y.kernel == kernel && params.x.kernel == kernel && params.y.stride == stride &&
           params.x.stride == stride && params.y.dilation == 1 && params.x.dilation == 1;
  };
  if (is(3, 1)) {
    run_depthwise_tile<3, 1, kChannelsLast>(run, in, weight, bias, out, params, regions, mirrored);
  } else if (is(5, 1)) {
    run_depthwise_tile<5, 1, kChannelsLast>(run, in, weight, bias, out, params, regions, mirrored);
  } else if (is(7, 1)) {
    run_depthwise_tile<7, 1, kChannelsLast>(run, in, weight, bias, out, params, regions, mirrored);
  } else if (is(3, 2)) {
    run_depthwise_tile<3, 2, kChannelsLast>(run, in, weight, bias, out, params, regions, mirrored);
  } else if (is(7, 2)) {
    run_depthwise_tile<7, 2, kChannelsLast>(run, in, weight, bias, out, params, regions, mirrored);
  } else if (unit_steps(params)) {
    run.program(
        DepthwiseWide<T, kChannelsLast>::make(in, weight, bias, out, params, regions, mirrored, run.most_shared));
  } else {
    run.each(DepthwiseAny<T, kChannelsLast>{in, weight, bias, out, params, regions, mirrored});
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
      run.each(DepthwiseAnyInputGrad<T, true>{seen, weight, grad_in, params, regions});
    } else {
      run.each(DepthwiseAnyInputGrad<T, false>{seen, weight, grad_in, params, regions});
    }
  }
}

}  // namespace torchtp::kernels
