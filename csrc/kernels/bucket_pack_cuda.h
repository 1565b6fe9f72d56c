#pragma once

#include <cuda_runtime_api.h>

#include "kernels/bucket_pack.h"

namespace torchtp::kernels {

// flat = tensors * scale, or back, on `stream`: one launch for every 512 tensors. T and F are float, c10::BFloat16 or
// c10::Half; device_scale may be null.
template <typename T, typename F>
void launch_bucket_pack(const std::vector<BucketTensor>& tensors, F* flat, float scale, const float* device_scale,
                        cudaStream_t stream);
template <typename T, typename F>
void launch_bucket_unpack(const std::vector<BucketTensor>& tensors, F* flat, float scale, const float* device_scale,
                          cudaStream_t stream);

// parts: [bucket_norm_parts(count)].
template <typename F>
void launch_bucket_norm(const F* flat, int64_t count, NormPart* parts, cudaStream_t stream);
// From the parts of all buckets; the same bits on every run.
void launch_clip_factor(const NormPart* parts, int64_t num_parts, float most, ClipResult* result, cudaStream_t stream);

}  // namespace torchtp::kernels
