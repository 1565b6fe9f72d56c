#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <tuple>
#include <vector>

#include "spatial/cut.h"

namespace torchtp::spatial {

// The numbers of a convolution, one entry per spatial dim where there are several.
struct ConvolutionParams {
  std::vector<int64_t> stride, padding, dilation, output_padding;
  bool transposed = false;
  int64_t groups = 1;
};

// This rank's rows of the output, which is cut as the input is. Pulls what its windows read from the ranks that own it.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       const ConvolutionParams& params, const std::vector<Cut>& cuts);

// (dx, dw, db) from this rank's rows of the output's gradient. dx is complete for own rows; dw and db are this rank's
// share: their sum over all ranks is the gradient. One pull of grad_output, one local convolution_backward on the input
// as it is. See NOTE [one local backward] in convolution.cpp.
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad_output,
                                                                    const at::Tensor& input, const at::Tensor& weight,
                                                                    const ConvolutionParams& params,
                                                                    const std::array<bool, 3>& output_mask,
                                                                    const std::vector<Cut>& cuts);

// Of the output and of the input's gradient, whatever computes them. See NOTE [format of a convolution] in
// convolution.cpp.
at::MemoryFormat convolution_format(const at::Tensor& input, const at::Tensor& weight);
// Memory for (dx, dw), as convolution_backward returns them.
std::tuple<at::Tensor, at::Tensor> new_gradients(const at::Tensor& input, const at::Tensor& weight,
                                                 const std::array<bool, 3>& output_mask);

// Raises on all ranks alike: where sizes, devices and numbers do not fit, a cut dim is not spatial or a kernel does not
// fit into one.
void check_convolution(const char* op, const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, const ConvolutionParams& params,
                       const std::vector<Cut>& cuts);
// The same, and what this rank alone sees: that the gradient and the input have the rows it owns.
void check_convolution_backward(const char* op, const at::Tensor& grad_output, const at::Tensor& input,
                                const at::Tensor& weight, const ConvolutionParams& params,
                                const std::vector<Cut>& cuts);

// Sizes of this rank's part of the output.
std::vector<int64_t> own_output_sizes(const at::Tensor& input, const at::Tensor& weight,
                                      const ConvolutionParams& params, const std::vector<Cut>& cuts);

// Global extent of the output on spatial dim `index` (0 = first) of an input of global `extent`.
int64_t convolution_extent(const ConvolutionParams& params, const at::Tensor& weight, size_t index, int64_t extent);

}  // namespace torchtp::spatial
