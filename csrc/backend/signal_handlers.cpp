#include "backend/signal_handlers.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <string>

#include "core/process.h"

namespace torchtp::backend {
namespace {

thread_local bool running = false;

}  // namespace

void run_signal_handlers() {
  if (running || !on_main_thread() || !Py_IsInitialized()) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_Occurred() != nullptr) return;  // who waits here is on its way out with that
  running = true;
  const bool raised = PyErr_CheckSignals() != 0;
  running = false;
  if (!raised) return;
  python_error error;
  error.persist();
  const std::string words = error.value == nullptr ? "" : error.message;
  error.message = reinterpret_cast<PyTypeObject*>(error.type)->tp_name;
  if (!words.empty()) error.message += ": " + words;
  throw error;
}

bool in_signal_handler() { return running; }

void refuse_in_signal_handler(const char* call) {
  TORCH_CHECK_WITH(DistBackendError, !running, "torchtp: a signal handler that runs while this rank waits for others ",
                   "cannot call ", call, "; set a flag in the handler and make the call in the training loop");
}

}  // namespace torchtp::backend
