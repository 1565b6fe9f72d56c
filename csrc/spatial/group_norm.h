#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torchtp::spatial {

// Raise where sizes or devices do not fit.
void check_group_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, int64_t num_groups);
void check_group_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                               const std::optional<at::Tensor>& weight, const at::Tensor& mean, const at::Tensor& rstd,
                               int64_t num_groups);

// (out, mean, rstd), the last two [N, num_groups]. `cut_groups` names the process groups that the spatial dims are cut
// over: statistics are those of all their ranks. With num_groups = C it is instance norm, with 1 layer norm over C, H,
// W.
std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm(const at::Tensor& input,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias, int64_t num_groups,
                                                          double eps, const std::vector<std::string>& cut_groups);

// (dx, dw, db); dw and db are this rank's share. One allreduce of two sums where dx is asked for.
std::tuple<at::Tensor, at::Tensor, at::Tensor> group_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const at::Tensor& mean, const at::Tensor& rstd, int64_t num_groups, const std::array<bool, 3>& output_mask,
    const std::vector<std::string>& cut_groups);

// Gradients for (dy, x, w) from the cotangents of (dx, dw, db); undefined ones are zero.
std::array<at::Tensor, 3> group_norm_double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                     const at::Tensor& grad_output, const at::Tensor& input,
                                                     const std::optional<at::Tensor>& weight, const at::Tensor& mean,
                                                     const at::Tensor& rstd, int64_t num_groups,
                                                     const std::vector<std::string>& cut_groups);

}  // namespace torchtp::spatial
