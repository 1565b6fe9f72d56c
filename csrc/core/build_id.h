#pragma once

#include <string>

namespace torchtp {

// What the linker wrote into the library (or program) that holds this code, in hex: equal only for one and the same
// build. Empty where the linker wrote nothing.
std::string build_id();

}  // namespace torchtp
