#pragma once

#include <vector>

#include "collectives/call.h"

namespace torchtp::collectives {

// On `root`, outputs[r] becomes what rank r passed as `input`; the other ranks pass no outputs.
void gather(const Call& call, const std::byte* input, const std::vector<std::byte*>& outputs, int64_t count,
            c10::ScalarType dtype, int root);

}  // namespace torchtp::collectives
