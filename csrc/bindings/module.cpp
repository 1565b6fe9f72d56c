// The Python module torchtp._C. Loading it registers the ops; its functions are what has no tensor in it.
#include <torch/csrc/utils/pybind.h>

#include "bindings/backend.h"
#include "bindings/exchange.h"
#include "bindings/geometry.h"
#include "bindings/gradients.h"
#include "bindings/kernels.h"
#include "bindings/trace.h"

PYBIND11_MODULE(_C, m) {
  m.attr("built_for_torch") = TORCHTP_BUILT_FOR_TORCH;

  torchtp::bindings::bind_geometry(m);
  torchtp::bindings::bind_trace(m);
  torchtp::bindings::bind_backend(m);
  torchtp::bindings::bind_exchange(m);
  torchtp::bindings::bind_gradients(m);
  torchtp::bindings::bind_kernels(m);
}
