#pragma once

#include "collectives/call.h"

namespace torchtp::collectives {

// Reduces `data` of all ranks in rank order, in place; every rank gets the same bits.
void allreduce(const Call& call, std::byte* data, int64_t count, c10::ScalarType dtype, ReduceOp op);

}  // namespace torchtp::collectives
