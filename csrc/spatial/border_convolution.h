#pragma once

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "spatial/convolution.h"

// Convolutions whose halos are never laid into one tensor with own rows and columns: ATen convolves these alone, with
// zeros around them, while the halos are on their way; then the few rows and columns of the result that read halos
// are computed again, from slabs. The activation is not copied; in return there are small launches for each border.
namespace torchtp::spatial {

// Whether every rank's part has a plain convolution of its own: images that are not transposed, two outputs or more.
bool has_border_way(const at::Tensor& input, const at::Tensor& weight, const ConvolutionParams& params,
                    const std::vector<Cut>& cuts);
// Whether parts are so large that it is the faster way there. The same answer on all ranks.
bool pays_border_way(const at::Tensor& input, const std::vector<Cut>& cuts);

// As convolution and convolution_backward (of input and weight), where has_border_way().
at::Tensor border_convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              const ConvolutionParams& params, const std::vector<Cut>& cuts);
std::tuple<at::Tensor, at::Tensor> border_convolution_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                                               const at::Tensor& weight,
                                                               const ConvolutionParams& params,
                                                               const std::array<bool, 3>& output_mask,
                                                               const std::vector<Cut>& cuts);

}  // namespace torchtp::spatial
