#pragma once

#include <vector>

#include "collectives/call.h"

namespace torchtp::collectives {

// `output` becomes inputs[rank] of all ranks, reduced in rank order; `count` elements each.
void reduce_scatter(const Call& call, const std::vector<const std::byte*>& inputs, std::byte* output, int64_t count,
                    c10::ScalarType dtype, ReduceOp op);

}  // namespace torchtp::collectives
