#pragma once

#include <pybind11/pytypes.h>

#include <string>

namespace torchtp::backend {

// What Python's traceback of an exception ends with, its first line, cut short: "ValueError: no such file". "" for None
// and for those by which loops and programs end in good order. With Python's lock.
std::string described(pybind11::handle exception);

// The same of the one that Python's code on this thread is on its way out with or takes care of (sys.exc_info()).
std::string handled_exception();

}  // namespace torchtp::backend
