#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchtp::bindings {

// Intervals, as (begin, end), and who sends what to whom.
void bind_geometry(pybind11::module_& m);

}  // namespace torchtp::bindings
