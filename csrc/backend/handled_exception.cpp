#include "backend/handled_exception.h"

#include <pybind11/pybind11.h>

#include "core/format.h"

namespace py = pybind11;

namespace torchtp::backend {

namespace {

constexpr size_t kLongest = 200;

}  // namespace

std::string described(py::handle exception) {
  if (!exception || exception.is_none()) return "";
  for (PyObject* const orderly :
       {PyExc_StopIteration, PyExc_StopAsyncIteration, PyExc_GeneratorExit, PyExc_SystemExit}) {
    if (PyObject_IsInstance(exception.ptr(), orderly) == 1) return "";
  }
  std::string text;
  try {
    text = py::str(exception).cast<std::string>();
  } catch (const std::exception&) {  // of its __str__, or no Unicode: the type will do
  }
  text = text.substr(0, text.find('\n'));
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  const char* const name = Py_TYPE(exception.ptr())->tp_name;
  return text.empty() ? name : cat(name, ": ", text);
}

std::string handled_exception() {
  if (!Py_IsInitialized()) return "";
  const py::gil_scoped_acquire gil;
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_GetExcInfo(&type, &value, &traceback);
  const auto own = [](PyObject* object) { return py::reinterpret_steal<py::object>(object); };
  const py::object held[] = {own(type), own(value), own(traceback)};
  return described(held[1]);
}

}  // namespace torchtp::backend
