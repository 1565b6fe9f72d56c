#include "kernels/bucket_pack_cuda.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"

namespace torchtp::kernels {

template <typename T, typename F>
void launch_bucket_pack(const std::vector<BucketTensor>& tensors, F* flat, float scale, const float* device_scale,
                        cudaStream_t stream) {
  run_bucket_move<T, F, true>(RunOnDevice{"bucket_pack", stream}, tensors, flat, scale, device_scale);
}

template <typename T, typename F>
void launch_bucket_unpack(const std::vector<BucketTensor>& tensors, F* flat, float scale, const float* device_scale,
                          cudaStream_t stream) {
  run_bucket_move<T, F, false>(RunOnDevice{"bucket_unpack", stream}, tensors, flat, scale, device_scale);
}

template <typename F>
void launch_bucket_norm(const F* flat, int64_t count, NormPart* parts, cudaStream_t stream) {
  launch_program("bucket_norm", BucketNorm<F>{{}, flat, count, parts}, stream);
}

void launch_clip_factor(const NormPart* parts, int64_t num_parts, float most, ClipResult* result, cudaStream_t stream) {
  launch_program("clip_factor", ClipFactor{{}, parts, num_parts, most, result}, stream);
}

#define TORCHTP_BUCKET(T, F)                                                                                       \
  template void launch_bucket_pack<T, F>(const std::vector<BucketTensor>&, F*, float, const float*, cudaStream_t); \
  template void launch_bucket_unpack<T, F>(const std::vector<BucketTensor>&, F*, float, const float*, cudaStream_t);
TORCHTP_BUCKET(float, float)
TORCHTP_BUCKET(float, c10::BFloat16)
TORCHTP_BUCKET(float, c10::Half)
TORCHTP_BUCKET(c10::BFloat16, float)
TORCHTP_BUCKET(c10::Half, float)
TORCHTP_BUCKET(c10::BFloat16, c10::BFloat16)
TORCHTP_BUCKET(c10::Half, c10::Half)
#undef TORCHTP_BUCKET

template void launch_bucket_norm(const float*, int64_t, NormPart*, cudaStream_t);
template void launch_bucket_norm(const c10::BFloat16*, int64_t, NormPart*, cudaStream_t);
template void launch_bucket_norm(const c10::Half*, int64_t, NormPart*, cudaStream_t);

}  // namespace torchtp::kernels
