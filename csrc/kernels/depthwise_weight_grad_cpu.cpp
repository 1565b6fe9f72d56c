#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "kernels/depthwise_weight_plan.h"
#include "kernels/run_on_host.h"

namespace torchtp::kernels {

namespace {

// The same for all types and kernels.
template <bool kChannelsLast>
int64_t splits_of(const HaloExtents& points, const DepthwiseParams& params) {
  using Tile = DepthwiseWeightTile<float, 3, kChannelsLast>;
  const HaloPlanes<float> planes{points};
  const int32_t tile = Tile::make(planes, planes, nullptr, params.batches, 0, 0, false).splits;
  const int32_t wide =
      DepthwiseWeightWide<float, kChannelsLast>::make(planes, planes, nullptr, params, 0, 0, false).splits;
  return std::max({tile, wide, DepthwiseWeightAny<float, kChannelsLast>::splits_of(params)});
}

}  // namespace

int64_t depthwise_weight_grad_scratch(const HaloExtents& in, const HaloExtents& grad_out,
                                      const DepthwiseParams& params) {
  const HaloExtents& points = grad_out.has_halo() ? in : grad_out;
  if (params.channels == 0) return 0;
  const int64_t splits = params.channels_last ? splits_of<true>(points, params) : splits_of<false>(points, params);
  return splits * params.channels * params.y.kernel * params.x.kernel;
}

template <typename T>
void depthwise_weight_grad_cpu(const HaloPlanes<T>& in, const HaloPlanes<T>& grad_out, T* grad_weight, float* scratch,
                               const DepthwiseParams& params) {
  run_depthwise_weight_grad(RunOnHost(), in, grad_out, grad_weight, scratch, params);
}

#define TORCHTP_DEPTHWISE(T)                                                                      \
  template void depthwise_weight_grad_cpu(const HaloPlanes<T>&, const HaloPlanes<T>&, T*, float*, \
                                          const DepthwiseParams&);
TORCHTP_DEPTHWISE(float)
TORCHTP_DEPTHWISE(c10::BFloat16)
TORCHTP_DEPTHWISE(c10::Half)
#undef TORCHTP_DEPTHWISE

}  // namespace torchtp::kernels
