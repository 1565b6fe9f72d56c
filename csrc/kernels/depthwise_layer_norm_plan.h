#pragma once

#include "kernels/depthwise_layer_norm_tile.h"
#include "kernels/depthwise_plan.h"

// Which program computes what; see depthwise_plan.h.
namespace torchtp::kernels {

template <bool kChannelsLast, typename T, typename Run>
void run_depthwise_layer_norm(const Run& run, const HaloPlanes<T>& in, const DepthwiseLayerNormArgs<T>& args,
                              const DepthwiseParams& params, Part part) {
  const auto is = [&](int32_t kernel) { return params.y.kernel == kernel && params.x.kernel == kernel; };
  for_each_region(in, params, part, false, [&](const HaloPlanes<T>& seen, const Regions& regions) {
    const auto go = [&](auto program) {
      run.program(decltype(program)::make(seen, args, params, regions, run.most_shared));
    };
    if (is(3)) {
      go(DepthwiseLayerNorm<T, 3, kChannelsLast>{});
    } else if (is(5)) {
      go(DepthwiseLayerNorm<T, 5, kChannelsLast>{});
    } else if (is(7)) {
      go(DepthwiseLayerNorm<T, 7, kChannelsLast>{});
    } else {
      go(DepthwiseLayerNorm<T, 0, kChannelsLast>{});
    }
  });
}

template <typename T, typename Run>
void run_depthwise_layer_norm(const Run& run, const HaloPlanes<T>& in, const DepthwiseLayerNormArgs<T>& args,
                              const DepthwiseParams& params, Part part) {
  if (params.channels_last) {
    run_depthwise_layer_norm<true>(run, in, args, params, part);
  } else {
    run_depthwise_layer_norm<false>(run, in, args, params, part);
  }
}

}  // namespace torchtp::kernels
