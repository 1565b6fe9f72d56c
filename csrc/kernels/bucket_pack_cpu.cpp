#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/bucket_pack.h"
#include "kernels/run_on_host.h"

namespace torchtp::kernels {

template <typename T, typename F>
void bucket_pack_cpu(const std::vector<BucketTensor>& tensors, F* flat, float scale) {
  run_bucket_move<T, F, true>(RunOnHost(), tensors, flat, scale, nullptr);
}

template <typename T, typename F>
void bucket_unpack_cpu(const std::vector<BucketTensor>& tensors, F* flat, float scale) {
  run_bucket_move<T, F, false>(RunOnHost(), tensors, flat, scale, nullptr);
}

template <typename F>
ClipResult clip_factor_cpu(const F* flat, int64_t count, float most) {
  std::vector<NormPart> parts(BucketNorm<F>::blocks_of(count));
  run_on_host(BucketNorm<F>{flat, count, parts.data()});
  ClipResult result{};
  run_on_host(ClipFactor{parts.data(), static_cast<int64_t>(parts.size()), most, &result});
  return result;
}

#define TORCHTP_BUCKET(T, F)                                                        \
  template void bucket_pack_cpu<T, F>(const std::vector<BucketTensor>&, F*, float); \
  template void bucket_unpack_cpu<T, F>(const std::vector<BucketTensor>&, F*, float);
TORCHTP_BUCKET(float, float)
TORCHTP_BUCKET(float, c10::BFloat16)
TORCHTP_BUCKET(float, c10::Half)
TORCHTP_BUCKET(c10::BFloat16, float)
#undef TORCHTP_BUCKET

template ClipResult clip_factor_cpu(const float*, int64_t, float);
template ClipResult clip_factor_cpu(const c10::BFloat16*, int64_t, float);

}  // namespace torchtp::kernels
