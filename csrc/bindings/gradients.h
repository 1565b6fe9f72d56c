#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchtp::bindings {

void bind_gradients(pybind11::module_& m);

}  // namespace torchtp::bindings
