#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchtp::bindings {

// Kernels by themselves, on tensors of the CPU or a device: for checks and benchmarks, where an op would add to them.
void bind_kernels(pybind11::module_& m);

}  // namespace torchtp::bindings
