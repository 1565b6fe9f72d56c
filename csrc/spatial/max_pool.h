#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "spatial/pool_geometry.h"

namespace torchtp::spatial {

// Own rows of the maxima and of their indices: flat ones of the global plane, as PyTorch gives them on one device.
std::tuple<at::Tensor, at::Tensor> max_pool(const at::Tensor& input, const PoolParams& params,
                                            const std::vector<Cut>& cuts);

// Throws where indices are not those of these outputs by their type, sizes and device.
void check_indices(const char* op, const at::Tensor& indices, const PoolGeometry& geometry, const at::Tensor& like);

// Own rows of the input's gradient. `input_sizes` are the local ones.
at::Tensor max_pool_backward(const at::Tensor& grad_output, const at::Tensor& indices, at::IntArrayRef input_sizes,
                             const PoolParams& params, const std::vector<Cut>& cuts);

// The adjoint of max_pool_backward: what stands at `indices` in the (cut) tensor.
at::Tensor max_pool_gather(const at::Tensor& input, const at::Tensor& indices, const PoolParams& params,
                           const std::vector<Cut>& cuts);

}  // namespace torchtp::spatial
