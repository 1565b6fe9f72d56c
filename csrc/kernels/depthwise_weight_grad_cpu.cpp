#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

#include "kernels/depthwise_weight_plan.h"
#include "kernels/run_on_host.h"

namespace torchtp::kernels {

namespace {

// The same for all types.
template <bool kChannelsLast>
int64_t splits_of(const HaloExtents& points, const DepthwiseParams& params, size_t most_shared) {
  const HaloPlanes<float> planes{points};
  const auto of_tile = [&](auto kernel) {
    using Tile = DepthwiseWeightTile<float, decltype(kernel)::value, kChannelsLast>;
    return Tile::make(planes, planes, nullptr, params.batches, 0, 0, false, most_shared).splits;
  };
  // Tiles differ where memory is short.
  const int32_t tile = std::max({of_tile(std::integral_constant<int, 3>()), of_tile(std::integral_constant<int, 5>()),
                                 of_tile(std::integral_constant<int, 7>())});
  const int32_t wide =
      DepthwiseWeightWide<float, kChannelsLast>::make(planes, planes, nullptr, params, 0, 0, false).splits;
  return std::max({tile, wide, DepthwiseWeightAny<float, kChannelsLast>::splits_of(params)});
}

}  // namespace

int64_t depthwise_weight_grad_scratch(const HaloExtents& in, const HaloExtents& grad_out, const DepthwiseParams& params,
                                      size_t most_shared) {
  const HaloExtents& points = grad_out.has_halo() ? in : grad_out;
  if (params.channels == 0) return 0;
  const int64_t splits = params.channels_last ? splits_of<true>(points, params, most_shared)
                                              : splits_of<false>(points, params, most_shared);
  return splits * params.channels * params.y.kernel * params.x.kernel;
}

template <typename T>
void depthwise_weight_grad_cpu(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, T* grad_weight, float* scratch,
                               const DepthwiseParams& params, size_t most_shared) {
  run_depthwise_weight_grad(RunOnHost{most_shared}, in, grad_out, grad_weight, scratch, params);
}

#define TORCHTP_DEPTHWISE(T)                                                                      \
  template void depthwise_weight_grad_cpu(const HaloPlanes<T>&, const HaloPlanes<T>&, T*, float*, \
                                          const DepthwiseParams&, size_t);
TORCHTP_DEPTHWISE(float)
TORCHTP_DEPTHWISE(c10::BFloat16)
TORCHTP_DEPTHWISE(c10::Half)
#undef TORCHTP_DEPTHWISE

}  // namespace torchtp::kernels
