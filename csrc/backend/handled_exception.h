#pragma once

#include <string>

namespace torchtp::backend {

// The type of the exception that Python's code on this thread is on its way out with or takes care of (sys.exc_info());
// "" where there is none, or one by which loops and programs end in good order.
std::string handled_exception();

}  // namespace torchtp::backend
