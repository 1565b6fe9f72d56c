#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

// Factors and summands that an op may have or not, a number for each channel or sample, as its kernels take them.
namespace torchtp::spatial {

inline at::Tensor factors(const std::optional<at::Tensor>& numbers, at::ScalarType type) {
  return numbers ? numbers->to(type).contiguous() : at::Tensor();
}

template <typename T>
const T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

}  // namespace torchtp::spatial
