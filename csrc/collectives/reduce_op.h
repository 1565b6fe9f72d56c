#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchtp::collectives {

// The numbers are c10d's. PREMUL_SUM arrives here as kSum: every rank has scaled its own input before.
enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kPremulSum };

const char* name_of(ReduceOp op);

// Whether `op` has a meaning for `dtype`. Bool: SUM and MAX are OR, PRODUCT and MIN are AND, there is no AVG.
bool is_reducible(c10::ScalarType dtype, ReduceOp op);

// out[i] = inputs[0][i] op inputs[1][i] op ..., in this order, 16-bit types in fp32 until the end; AVG divides the sum
// by the number of inputs, or by `divisor` if that is not 0 (integers truncate), MIN and MAX keep NaN. `out` may be one
// of the inputs.
void reduce_inputs(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, c10::ScalarType dtype,
                   ReduceOp op, int divisor = 0);

// The op between partial results, and the dtype that they need so that the end has the same digits as of one step.
ReduceOp partial_op(ReduceOp op);
c10::ScalarType partial_dtype(c10::ScalarType dtype, ReduceOp op);

}  // namespace torchtp::collectives
