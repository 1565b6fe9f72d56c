#pragma once

#include "spatial/convolution.h"

namespace torchtp::spatial {

// Whether the gradient of the filters goes to kernels/depthwise_weight_rows.h: on the CPU, one filter a channel of
// images, but for what oneDNN has fast loops for: windows of at most 3 with at most a zero around, in fp32 and, where
// the processor has AVX-512, bf16. Of others ATen's time is 1.6 to 39 times as long (170 in bf16 without AVX-512;
// python -m benchmarks.filter_gradients). A rank's own business: it says nothing about what is sent.
bool has_weight_rows(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params);

// As at::convolution_backward's gradient of the weight.
at::Tensor weight_rows(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                       const ConvolutionParams& params);

// Whether the gradient of the input is better taken as the convolution by the filters turned around that it is: of one
// filter a channel, dilated, without stride. ATen's takes ten times as long.
bool pays_mirrored(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params);
at::Tensor mirrored_convolution(const at::Tensor& grad_output, const at::Tensor& weight,
                                const ConvolutionParams& params);

}  // namespace torchtp::spatial
