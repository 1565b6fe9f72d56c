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
void bucket_norm_cpu(const F* flat, int64_t count, NormPart* parts) {
  run_on_host(BucketNorm<F>{{}, flat, count, parts});
}

void clip_factor_cpu(const NormPart* parts, int64_t num_parts, float most, ClipResult* result) {
  run_on_host(ClipFactor{{}, parts, num_parts, most, result});
}

#define TORCHTP_BUCKET(T, F)                                                        \
  template void bucket_pack_cpu<T, F>(const std::vector<BucketTensor>&, F*, float); \
  template void bucket_unpack_cpu<T, F>(const std::vector<BucketTensor>&, F*, float);
TORCHTP_BUCKET(float, float)
TORCHTP_BUCKET(float, c10::BFloat16)
TORCHTP_BUCKET(float, c10::Half)
TORCHTP_BUCKET(c10::BFloat16, float)
TORCHTP_BUCKET(c10::Half, float)
TORCHTP_BUCKET(c10::BFloat16, c10::BFloat16)
TORCHTP_BUCKET(c10::Half, c10::Half)
#undef TORCHTP_BUCKET

template void bucket_norm_cpu(const float*, int64_t, NormPart*);
template void bucket_norm_cpu(const c10::BFloat16*, int64_t, NormPart*);
template void bucket_norm_cpu(const c10::Half*, int64_t, NormPart*);

}  // namespace torchtp::kernels
