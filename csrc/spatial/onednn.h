#pragma once

#include <ATen/core/Tensor.h>

namespace torchtp::spatial {

// Whether ATen hands convolutions of such a tensor to oneDNN, as far as dtype, processor and switches go.
bool onednn_takes(const at::Tensor& input);

// Whether its loops are those of AVX-512 (or of another processor with bfloat16).
bool onednn_is_wide();

}  // namespace torchtp::spatial
