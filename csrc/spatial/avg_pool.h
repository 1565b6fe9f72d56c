#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "spatial/pool_geometry.h"

namespace torchtp::spatial {

// What a window's sum is divided by.
struct AvgPoolDivisor {
  bool count_include_pad = true;
  std::optional<int64_t> override_by;
};

// Of the output, and of the input's gradient: as ATen has it, contiguous in three dims.
at::MemoryFormat avg_pool_format(const PoolGeometry& geometry, const at::Tensor& like);

// Own rows of the output. Dilation of the params is 1.
at::Tensor avg_pool(const at::Tensor& input, const PoolParams& params, const AvgPoolDivisor& divisor,
                    const std::vector<Cut>& cuts);

// Own rows of the input's gradient; `input_sizes` are the local ones.
at::Tensor avg_pool_backward(const at::Tensor& grad_output, at::IntArrayRef input_sizes, const PoolParams& params,
                             const AvgPoolDivisor& divisor, const std::vector<Cut>& cuts);

}  // namespace torchtp::spatial
