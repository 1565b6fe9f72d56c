#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace torchtp::spatial {

// Raise where sizes, types or devices do not fit.
void check_layer_scale(const at::Tensor& residual, const at::Tensor& branch, const std::optional<at::Tensor>& gamma,
                       const std::optional<at::Tensor>& keep);
void check_layer_scale_backward(const at::Tensor& grad_output, const at::Tensor& branch,
                                const std::optional<at::Tensor>& gamma, const std::optional<at::Tensor>& keep);

// residual + branch * gamma[c] * keep[n] over [N, C, ...], in one pass: a block's layer scale, DropPath and residual.
// gamma and keep may be left out. Local, so that sharded tensors need nothing more.
at::Tensor layer_scale(const at::Tensor& residual, const at::Tensor& branch, const std::optional<at::Tensor>& gamma,
                       const std::optional<at::Tensor>& keep);

// Gradients of branch and gamma, as the mask wants them; gamma's is this rank's share. The residual's is grad_output.
std::tuple<at::Tensor, at::Tensor> layer_scale_backward(const at::Tensor& grad_output, const at::Tensor& branch,
                                                        const std::optional<at::Tensor>& gamma,
                                                        const std::optional<at::Tensor>& keep,
                                                        const std::array<bool, 2>& output_mask);

}  // namespace torchtp::spatial
