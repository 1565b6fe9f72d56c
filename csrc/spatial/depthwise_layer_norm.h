#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "spatial/convolution.h"

namespace torchtp::spatial {

// The layer norm over dim 1, with a weight and a bias or without.
struct ChannelNorm {
  std::optional<at::Tensor> weight, bias;
  double eps;
};

// Layer norm over the channels of a convolution with one filter a channel: (out, the convolution's output, mean, rstd),
// the last three as convolution and layer_norm_channels_first give them. The second one is empty unless `keep`. One
// after the other: on an H200 that is up to ten times as fast as the kernel that does both (docs/cuda.md).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> depthwise_layer_norm(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const ConvolutionParams& params, const ChannelNorm& norm, bool keep, const std::vector<Cut>& cuts);

// By that kernel, halos left where they arrive; what needs none is computed while they are on their way. On the CPU its
// twin runs: for tests of this way, right and not fast.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> depthwise_layer_norm_pieces(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const ConvolutionParams& params, const ChannelNorm& norm, bool keep, const std::vector<Cut>& cuts);

}  // namespace torchtp::spatial
