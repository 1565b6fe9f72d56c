#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchtp::bindings {

// Exchanges of byte strings, for the suite that all kinds of exchange must pass, and how halos of a group travel.
void bind_exchange(pybind11::module_& m);

}  // namespace torchtp::bindings
