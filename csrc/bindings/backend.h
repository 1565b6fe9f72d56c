#pragma once

#include <pybind11/pybind11.h>

namespace torchtp::bindings {

// The class TorchtpBackend, which torchtp/backend.py registers with torch.distributed.
void bind_backend(pybind11::module_& m);

}  // namespace torchtp::bindings
