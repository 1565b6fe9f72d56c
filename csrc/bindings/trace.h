#pragma once

#include <pybind11/pybind11.h>

namespace torchtp::bindings {

void bind_trace(pybind11::module_& m);

}  // namespace torchtp::bindings
