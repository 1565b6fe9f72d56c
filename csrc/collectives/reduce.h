#pragma once

#include "collectives/call.h"

namespace torchtp::collectives {

// Reduces `data` of all ranks in rank order, in place on `root`; the other ranks keep theirs.
void reduce(const Call& call, std::byte* data, int64_t count, c10::ScalarType dtype, ReduceOp op, int root);

}  // namespace torchtp::collectives
