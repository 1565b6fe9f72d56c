#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/depthwise_layer_norm_plan.h"
#include "kernels/run_on_host.h"

namespace torchtp::kernels {

namespace {

size_t bytes_of(const DepthwiseParams& params, int64_t element_bytes, int32_t rows, int32_t columns) {
  return DepthwiseLayerNormMemory{
      rows, columns, params.y.kernel, params.x.kernel, params.channels, element_bytes, params.channels_last}
      .bytes();
}

}  // namespace

bool depthwise_layer_norm_fits(const DepthwiseParams& params, int64_t element_bytes, size_t most_shared) {
  return unit_steps(params) && bytes_of(params, element_bytes, 4, 8) <= most_shared &&
         bytes_of(params, element_bytes, 8, 4) <= most_shared;
}

template <typename T>
void depthwise_layer_norm_cpu(const HaloPlanes<T>& in, const DepthwiseLayerNormArgs<T>& args,
                              const DepthwiseParams& params, Part part, size_t most_shared) {
  run_depthwise_layer_norm(RunOnHost{most_shared}, in, args, params, part);
}

#define TORCHTP_DEPTHWISE_LAYER_NORM(T)                                                          \
  template void depthwise_layer_norm_cpu(const HaloPlanes<T>&, const DepthwiseLayerNormArgs<T>&, \
                                         const DepthwiseParams&, Part, size_t);
TORCHTP_DEPTHWISE_LAYER_NORM(float)
TORCHTP_DEPTHWISE_LAYER_NORM(c10::BFloat16)
TORCHTP_DEPTHWISE_LAYER_NORM(c10::Half)
#undef TORCHTP_DEPTHWISE_LAYER_NORM

}  // namespace torchtp::kernels
