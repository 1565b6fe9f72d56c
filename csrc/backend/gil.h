#pragma once

#include <Python.h>

namespace torchtp::backend {

// Releases Python's lock while it lives, if this thread holds it: before every wait for another thread, which may need
// the lock to drop a Python object. See docs/backend.md, "Teardown".
class GilRelease {
 public:
  GilRelease() {
    if (Py_IsInitialized() && holds()) state_ = PyEval_SaveThread();
  }
  ~GilRelease() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  // PyGILState_Check() says yes to everybody once there has been a subinterpreter.
  static bool holds() {
    PyThreadState* const mine = PyGILState_GetThisThreadState();
    return mine != nullptr && mine == _PyThreadState_UncheckedGet();
  }

  PyThreadState* state_ = nullptr;
};

}  // namespace torchtp::backend
