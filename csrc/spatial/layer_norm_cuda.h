#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "spatial/device.h"

#ifdef TORCHTP_CUDA
namespace torchtp::spatial {

// layer_norm_channels_first and its backward by the kernels of kernels/layer_norm_cuda.h, in both layouts of x. mean
// and rstd are [N, ...].
bool has_layer_norm_cuda(const at::Tensor& x);
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_cuda(const at::Tensor& x,
                                                               const std::optional<at::Tensor>& weight,
                                                               const std::optional<at::Tensor>& bias, double eps);
// Gradients of weight and bias in weight's type if that is x's, else in float.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward_cuda(const at::Tensor& dy, const at::Tensor& x,
                                                                        const std::optional<at::Tensor>& weight,
                                                                        const at::Tensor& mean, const at::Tensor& rstd,
                                                                        const std::array<bool, 3>& output_mask);

}  // namespace torchtp::spatial
#endif
