#include "kernels/layer_scale.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace torchtp::kernels {
namespace {

template <typename T, typename A, int kVector, bool kChannelsLast>
void run(const LayerScale<T, A, kVector, kChannelsLast>& work, int64_t begin, int64_t end) {
  for (int64_t i = begin / kVector; i < end / kVector; ++i) work(i);
}

}  // namespace

template <typename T, typename A>
void layer_scale_cpu(const LayerScaleParams<T, A>& params, bool channels_last, int64_t begin, int64_t end) {
  with_layer_scale(params, channels_last, [&](const auto& work) { run(work, begin, end); });
}

#define TORCHTP_LAYER_SCALE(T, A) template void layer_scale_cpu(const LayerScaleParams<T, A>&, bool, int64_t, int64_t);
TORCHTP_LAYER_SCALE(float, float)
TORCHTP_LAYER_SCALE(double, double)
TORCHTP_LAYER_SCALE(c10::BFloat16, float)
TORCHTP_LAYER_SCALE(c10::Half, float)
#undef TORCHTP_LAYER_SCALE

}  // namespace torchtp::kernels
