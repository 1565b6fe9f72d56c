#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchtp::gradients {

// A tensor and its place in a flat buffer of real numbers. A complex tensor is two numbers an element.
struct Move {
  at::Tensor tensor;  // its elements in the order of memory, without gaps
  int64_t begin;      // first number in the buffer
};

// Whether this build has kernels for the device and these types: of the tensors, of the buffer. The CPU's are the
// device's own, block after block, for tests: right, not fast.
bool moves_together(const at::Device& device, at::ScalarType tensors, at::ScalarType buffer);

// buffer = tensors * scale, and back: one launch on the current stream for every 512 tensors.
void pack(const std::vector<Move>& moves, const at::Tensor& buffer, double scale);
void unpack(const std::vector<Move>& moves, const at::Tensor& buffer, double scale);

// The 2-norm of all numbers of `buffers` (one device, types that move together), and the factor that makes it at most
// `most`, as torch.nn.utils.clip_grad_norm_ has it, and 1 if any is not finite: three floats on the device. A launch
// for each buffer and one more.
at::Tensor norm_and_factor(const std::vector<at::Tensor>& buffers, double most);

}  // namespace torchtp::gradients
