#pragma once

#include <vector>

#include "collectives/call.h"

namespace torchtp::collectives {

// outputs[r] becomes what rank r passed as `input`; all have `count` elements.
void allgather(const Call& call, const std::byte* input, const std::vector<std::byte*>& outputs, int64_t count,
               c10::ScalarType dtype);

}  // namespace torchtp::collectives
