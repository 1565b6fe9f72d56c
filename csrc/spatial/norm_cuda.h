#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "spatial/batch_norm.h"
#include "spatial/device.h"

#ifdef TORCHTP_CUDA
namespace torchtp::spatial {

// Norms by the kernels of kernels/norm_cuda.h, of dense tensors that has_cuda_kernels. Two launches that pass over the
// tensor and one between them for everything else, or two and an exchange where there are ranks.

// The ops of batch_norm.h and group_norm.h after their checks; statistics in float.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_cuda(const at::Tensor& x,
                                                               const std::optional<at::Tensor>& weight,
                                                               const std::optional<at::Tensor>& bias,
                                                               const BatchNormParams& params,
                                                               const std::vector<std::string>& ranks);
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_cuda(
    const at::Tensor& dy, const at::Tensor& x, const std::optional<at::Tensor>& weight, const at::Tensor& save_mean,
    const at::Tensor& save_invstd, const BatchNormParams& params, const std::array<bool, 3>& output_mask,
    const std::vector<std::string>& ranks);
std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_cuda(const at::Tensor& x,
                                                               const std::optional<at::Tensor>& weight,
                                                               const std::optional<at::Tensor>& bias,
                                                               int64_t num_groups, double eps,
                                                               const std::vector<std::string>& ranks);
std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_backward_cuda(const at::Tensor& dy, const at::Tensor& x,
                                                                        const std::optional<at::Tensor>& weight,
                                                                        const at::Tensor& mean, const at::Tensor& rstd,
                                                                        int64_t num_groups,
                                                                        const std::array<bool, 3>& output_mask,
                                                                        const std::vector<std::string>& ranks);

// dy * scale, which is [N, C] or [1, C] in float or undefined as the result then is, and the sums of dy * x * keep over
// all but the channels, [C] in `type`. keep is [N] in float, or undefined.
std::tuple<at::Tensor, at::Tensor> scaled_and_dots_cuda(const at::Tensor& dy, const at::Tensor& x,
                                                        const at::Tensor& scale, const at::Tensor& keep,
                                                        at::ScalarType type);

}  // namespace torchtp::spatial
#endif
