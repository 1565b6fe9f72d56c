#pragma once

#include <ATen/core/Tensor.h>

#include "core/interval.h"
#include "kernels/halo_slab.h"

namespace torchtp::spatial {

// Where rows (local coordinates) of a dense tensor's dim lie, for kernels that move them.
kernels::HaloSlab halo_slab(const at::Tensor& tensor, int64_t dim, const Interval& rows);
// The layout a payload cut from the tensor has: what `layout` of a message means.
uint32_t layout_number(const at::Tensor& tensor);

}  // namespace torchtp::spatial
