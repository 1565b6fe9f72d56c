#pragma once

#include "spatial/device.h"
#include "spatial/norm.h"

#ifdef TORCHTP_CUDA
namespace torchtp::spatial {

// The passes of norm.h by the kernels of kernels/norm_cuda.h, for tensors that has_cuda_kernels.
Moments moments_cuda(const at::Tensor& x);
std::tuple<Numbers, Numbers> dots_cuda(const at::Tensor& dy, const at::Tensor& x, const Numbers& center);
at::Tensor affine_cuda(const at::Tensor& x, const Numbers& center, const Numbers& scale, const Numbers& shift);
at::Tensor combine_cuda(const at::Tensor& dy, const at::Tensor& x, const Numbers& center, const Numbers& on_dy,
                        const Numbers& on_x, const Numbers& shift);

}  // namespace torchtp::spatial
#endif
