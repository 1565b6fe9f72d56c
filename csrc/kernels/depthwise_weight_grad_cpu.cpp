#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "kernels/depthwise_weight_plan.h"
#include "kernels/run_on_host.h"

namespace torchtp::kernels {

namespace {

// The plan alone.
struct RunNothing {
  size_t most_shared;

  template <typename Program>
  void program(const Program&) const {}
  template <typename Work>
  void each(const Work&) const {}
};

}  // namespace

int64_t depthwise_weight_grad_scratch(const HaloExtents& in, const HaloExtents& grad_out, const DepthwiseParams& params,
                                      size_t most_shared) {
  const auto splits = [&](auto type) {
    const HaloPlanes<decltype(type)> x{in}, dy{grad_out};
    return run_weight_splits(RunNothing{most_shared}, x, dy, nullptr, params);
  };
  return std::max(splits(float()), splits(c10::Half())) * int64_t{params.channels} * params.y.kernel * params.x.kernel;
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
