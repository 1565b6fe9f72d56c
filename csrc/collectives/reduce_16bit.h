#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/reduce_op.h"

namespace torchtp::collectives {

// reduce_inputs() for fp16 (Half) and bf16 (BFloat16) with the processor's vector instructions; false, and nothing
// done, where it has none for that or the op is not SUM, AVG, PRODUCT, MIN or MAX.
bool reduce_16bit(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, c10::ScalarType dtype,
                  ReduceOp op);

}  // namespace torchtp::collectives
