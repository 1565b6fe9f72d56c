#include "backend/handled_exception.h"

#include <pybind11/pybind11.h>

namespace torchtp::backend {

std::string handled_exception() {
  if (!Py_IsInitialized()) return "";
  const pybind11::gil_scoped_acquire gil;
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_GetExcInfo(&type, &value, &traceback);
  const auto own = [](PyObject* object) { return pybind11::reinterpret_steal<pybind11::object>(object); };
  const pybind11::object held[] = {own(type), own(value), own(traceback)};
  if (!value || value == Py_None) return "";
  for (PyObject* const orderly :
       {PyExc_StopIteration, PyExc_StopAsyncIteration, PyExc_GeneratorExit, PyExc_SystemExit}) {
    if (PyObject_IsInstance(value, orderly) == 1) return "";
  }
  return Py_TYPE(value)->tp_name;
}

}  // namespace torchtp::backend
