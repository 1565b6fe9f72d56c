#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "kernels/layer_norm.h"

namespace torchtp::spatial {

inline kernels::LayerNormParams layer_norm_params(const at::Tensor& x) {
  kernels::LayerNormParams params{x.size(0), x.size(1), 1};
  for (int64_t dim = 2; dim < x.dim(); ++dim) params.inner *= x.size(dim);
  return params;
}

// Raise where sizes or devices do not fit.
void check_layer_norm_channels_first(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                                     const std::optional<at::Tensor>& bias);
void check_layer_norm_channels_first_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                              const std::optional<at::Tensor>& weight, const at::Tensor& mean,
                                              const at::Tensor& rstd);

// Layer norm over dim 1 of [N, C, ...], without the two permutations that F.layer_norm needs: (out, mean, rstd), the
// last two of the input's sizes without dim 1. Local: no cut dim is looked at.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_channels_first(const at::Tensor& input,
                                                                         const std::optional<at::Tensor>& weight,
                                                                         const std::optional<at::Tensor>& bias,
                                                                         double eps);

// (dx, dw, db); dw and db are this rank's share.
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_channels_first_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const at::Tensor& mean, const at::Tensor& rstd, const std::array<bool, 3>& output_mask);

// Gradients for (dy, x, w) from the cotangents of (dx, dw, db); undefined ones are zero.
std::array<at::Tensor, 3> layer_norm_channels_first_double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                                    const at::Tensor& grad_output,
                                                                    const at::Tensor& input,
                                                                    const std::optional<at::Tensor>& weight,
                                                                    const at::Tensor& mean, const at::Tensor& rstd);

}  // namespace torchtp::spatial
