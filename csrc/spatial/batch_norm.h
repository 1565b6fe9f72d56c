#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torchtp::spatial {

// The statistics a batch norm keeps, and how.
struct BatchNormParams {
  std::optional<at::Tensor> running_mean, running_var;
  bool training = true;
  double momentum = 0.1;
  double eps = 1e-5;
};

// Raise where sizes or devices do not fit.
void check_batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, const BatchNormParams& params);
void check_batch_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                               const std::optional<at::Tensor>& weight, const at::Tensor& save_mean,
                               const at::Tensor& save_invstd, const BatchNormParams& params);

// (out, save_mean, save_invstd). In training the statistics are those of all ranks of the groups, and the running ones
// are updated; otherwise the running ones are used and what is saved is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input,
                                                          const std::optional<at::Tensor>& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          const BatchNormParams& params,
                                                          const std::vector<std::string>& cut_groups);

// (dx, dw, db); dw and db are this rank's share. In training one allreduce of two sums, where dx is asked for.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const at::Tensor& save_mean, const at::Tensor& save_invstd, const BatchNormParams& params,
    const std::array<bool, 3>& output_mask, const std::vector<std::string>& cut_groups);

// Gradients for (dy, x, w) from the cotangents of (dx, dw, db); undefined ones are zero.
std::array<at::Tensor, 3> batch_norm_double_backward(const std::array<at::Tensor, 3>& cotangents,
                                                     const at::Tensor& grad_output, const at::Tensor& input,
                                                     const std::optional<at::Tensor>& weight,
                                                     const at::Tensor& save_mean, const at::Tensor& save_invstd,
                                                     const BatchNormParams& params,
                                                     const std::vector<std::string>& cut_groups);

}  // namespace torchtp::spatial
