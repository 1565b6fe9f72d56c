#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

// What ops refuse at the door, because their kernels take it for granted. Only what a tensor says of itself is looked
// at, so nothing waits for a device. Sizes may be symbolic, as fake tensors' are.
namespace torchtp::spatial {

// One number for each channel (or other index of `dim`) of x, which lies where x does. Nothing may be there.
void check_row(const char* op, const char* name, const std::optional<at::Tensor>& row, const at::Tensor& x,
               int64_t dim = 1);
// A tensor of these sizes that lies where `like` does.
void check_sizes(const char* op, const char* name, const at::Tensor& tensor, c10::SymIntArrayRef sizes,
                 const at::Tensor& like);
void check_sizes(const char* op, const char* name, const at::Tensor& tensor, at::IntArrayRef sizes,
                 const at::Tensor& like);
// A list with a number for each of the spatial dims.
void check_list(const char* op, const char* name, at::IntArrayRef list, int64_t num_dims);

}  // namespace torchtp::spatial
