#pragma once

#include "spatial/device.h"
#include "spatial/norm.h"

#ifdef TORCHTP_CUDA
namespace torchtp::spatial {

// The passes of norm.h by the kernels of kernels/norm_cuda.h, for tensors that has_cuda_kernels.
Moments moments_cuda(const at::Tensor& x);
std::tuple<Numbers, Numbers> dots_cuda(const at::Tensor& dy, const at::Tensor& x, const Numbers& center);
// dy * scale, [N, C] or [1, C] in float, and the sums of dy * x of every batch and channel, [N, C] in double, in one
// pass.
std::tuple<at::Tensor, at::Tensor> scaled_and_dots_cuda(const at::Tensor& dy, const at::Tensor& x,
                                                        const at::Tensor& scale);
at::Tensor affine_cuda(const at::Tensor& x, const Numbers& center, const Numbers& scale, const Numbers& shift);
at::Tensor combine_cuda(const at::Tensor& dy, const at::Tensor& x, const Numbers& center, const Numbers& on_dy,
                        const Numbers& on_x, const Numbers& shift);

}  // namespace torchtp::spatial
#endif
