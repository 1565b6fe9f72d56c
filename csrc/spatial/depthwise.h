#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels/depthwise.h"
#include "spatial/convolution.h"

namespace torchtp::spatial {

// One filter a channel of images.
bool has_filter_each(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params);

// Whether convolution and its backward go to the kernels of kernels/depthwise.h: on CUDA, one filter a channel of
// images, for the kernels and strides they take. The same answer on all ranks.
bool has_depthwise(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params);

// Of this rank, from what it owns of input and output.
kernels::DepthwiseParams depthwise_params(const at::Tensor& input, at::IntArrayRef out_sizes, const at::Tensor& weight,
                                          const ConvolutionParams& params, const std::vector<Cut>& cuts);

// What a rank computes of the output: its numbers, its sizes, and which rows of the input every rank of every cut
// reads.
struct DepthwiseOutput {
  kernels::DepthwiseParams params;
  std::vector<int64_t> sizes;
  std::vector<std::vector<Interval>> wanted;
};
DepthwiseOutput depthwise_output(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params,
                                 const std::vector<Cut>& cuts);

// As convolution and convolution_backward, for one filter a channel of [N, C, H, W] of float, bfloat16 or float16, for
// the kernels and strides of kernels/depthwise.h. Halos stay where they arrive; what needs none is computed while they
// are on their way. On the CPU the kernels' twin runs: for tests of this way, right and not fast.
at::Tensor depthwise(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     const ConvolutionParams& params, const std::vector<Cut>& cuts);
std::tuple<at::Tensor, at::Tensor> depthwise_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                                      const at::Tensor& weight, const ConvolutionParams& params,
                                                      const std::array<bool, 3>& output_mask,
                                                      const std::vector<Cut>& cuts);

}  // namespace torchtp::spatial
