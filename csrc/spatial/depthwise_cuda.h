#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "spatial/convolution.h"
#include "spatial/device.h"

#ifdef TORCHTP_CUDA
namespace torchtp::spatial {

// Depthwise convolution by the kernels of kernels/depthwise_cuda.h; params.padding is local and may be anything.
// Whether they are made for it: 2-D, one filter a channel, and a program that does better than one element a thread.
bool has_depthwise_cuda(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params);
at::Tensor depthwise_cuda(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          const ConvolutionParams& params);

bool has_depthwise_backward_cuda(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params);
// (dx, dw), as the mask wants them.
std::tuple<at::Tensor, at::Tensor> depthwise_backward_cuda(const at::Tensor& grad_output, const at::Tensor& input,
                                                           const at::Tensor& weight, const ConvolutionParams& params,
                                                           const std::array<bool, 3>& output_mask);

}  // namespace torchtp::spatial
#endif
