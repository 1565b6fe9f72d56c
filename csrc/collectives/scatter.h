#pragma once

#include <vector>

#include "collectives/call.h"

namespace torchtp::collectives {

// `output` becomes inputs[rank] of `root`; the other ranks pass no inputs.
void scatter(const Call& call, const std::vector<const std::byte*>& inputs, std::byte* output, int64_t count,
             c10::ScalarType dtype, int root);

}  // namespace torchtp::collectives
