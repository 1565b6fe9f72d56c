#pragma once

#include "kernels/depthwise_known.h"
#include "kernels/depthwise_weight_band.h"
#include "kernels/depthwise_weight_grad.h"
#include "kernels/depthwise_weight_pixels.h"
#include "kernels/depthwise_weight_tile.h"
#include "kernels/depthwise_weight_wide.h"
#include "kernels/split_sum.h"

// Which program computes the gradient of the filters; see depthwise_plan.h for Run.
namespace torchtp::kernels {

template <int kKernel, int kStride, bool kChannelsLast, typename T>
auto weight_of_known(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, float* scratch,
                     const DepthwiseParams& params, size_t most_shared) {
  const Steps steps{params.y.dilation, params.x.dilation};
  const auto make = [&](const HaloPlanes<T>& points, const HaloPlanes<T>& window, const DepthwiseParams& seen,
                        bool mirrored) {
    if constexpr (kChannelsLast && kKernel <= kMostPixelsKernel) {
      using Pixels = DepthwiseWeightPixels<T, kKernel, kStride>;
      return Pixels::make(points, window, scratch, params.batches, seen.y.offset, seen.x.offset, steps, mirrored);
    } else {
      using Tile = DepthwiseWeightTile<T, kKernel, kStride, kChannelsLast>;
      return Tile::make(points, window, scratch, params.batches, seen.y.offset, seen.x.offset, steps, mirrored,
                        most_shared);
    }
  };
  if (kStride > 1 || !grad_out.has_halo()) return make(grad_out, in, params, false);
  return make(in, grad_out, input_grad_as_forward(params), true);
}

template <int kKernel, bool kChannelsLast, typename T>
auto weight_band(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, float* scratch, const DepthwiseParams& params,
                 size_t most_shared) {
  using Band = DepthwiseWeightBand<T, kKernel, kChannelsLast>;
  if (!grad_out.has_halo()) {
    return Band::make(grad_out, in, scratch, params.batches, params.y.offset, params.x.offset, false, most_shared);
  }
  const DepthwiseParams back = input_grad_as_forward(params);
  return Band::make(in, grad_out, scratch, params.batches, back.y.offset, back.x.offset, true, most_shared);
}

// At a stride of 1 the points are the factor without halo, at others the output's gradient.
template <bool kChannelsLast, typename T>
auto weight_wide(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, float* scratch, const DepthwiseParams& params,
                 size_t most_shared) {
  using Wide = DepthwiseWeightWide<T, kChannelsLast>;
  const bool unit = params.y.stride == 1 && params.x.stride == 1;
  return unit && grad_out.has_halo()
             ? Wide::make(in, grad_out, scratch, input_grad_as_forward(params), true, most_shared)
             : Wide::make(grad_out, in, scratch, params, false, most_shared);
}

template <bool kChannelsLast, typename T, typename Run>
int32_t run_weight_splits_in(const Run& run, const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, float* scratch,
                             const DepthwiseParams& params) {
  const HaloPlanes<T>& counted = grad_out.has_halo() ? in : grad_out;
  if (params.batches * params.channels * counted.height * counted.width == 0) return 0;
  int32_t splits = 0;
  const auto go = [&](const auto& program) {
    run.program(program);
    splits = program.splits;
  };
  const auto band = [&](auto kernel, auto) {
    if constexpr (sizeof(T) == 2) {
      go(weight_band<decltype(kernel)::value, kChannelsLast>(in, grad_out, scratch, params, run.most_shared));
    }
  };
  if (with_band<T>(params, band)) return splits;
  const auto tile = [&](auto kernel, auto stride) {
    go(weight_of_known<decltype(kernel)::value, decltype(stride)::value, kChannelsLast>(in, grad_out, scratch, params,
                                                                                        run.most_shared));
  };
  if (!with_known_kernel<1>(params, tile) && !with_known_kernel<2>(params, tile)) {
    go(weight_wide<kChannelsLast>(in, grad_out, scratch, params, run.most_shared));
  }
  return splits;
}

// The first stage: the number of splits that it leaves in `scratch`.
template <typename T, typename Run>
int32_t run_weight_splits(const Run& run, const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, float* scratch,
                          const DepthwiseParams& params) {
  return params.channels_last ? run_weight_splits_in<true>(run, in, grad_out, scratch, params)
                              : run_weight_splits_in<false>(run, in, grad_out, scratch, params);
}

template <typename T, typename Run>
void run_depthwise_weight_grad(const Run& run, const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, T* grad_weight,
                               float* scratch, const DepthwiseParams& params) {
  const int64_t count = int64_t{params.channels} * params.y.kernel * params.x.kernel;
  const int32_t splits = run_weight_splits(run, in, grad_out, scratch, params);
  run.program(SplitSum<T>{scratch, grad_weight, count, splits});
}

}  // namespace torchtp::kernels
