#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/reduce_op.h"

namespace torchtp::collectives {

// reduce_inputs() for fp32, fp16 and bf16, or some of them, with vector instructions; false, and nothing done, for
// other dtypes and where the op is not SUM, AVG, PRODUCT, MIN or MAX. The bits of a number do not depend on the
// instructions.
using SimdReduction = bool(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count,
                           c10::ScalarType dtype, ReduceOp op, int divisor);

namespace avx2 {
SimdReduction reduce;
}
namespace avx512 {
SimdReduction reduce;
}
namespace avx512_bf16 {
SimdReduction reduce;
bool is_here();  // in the processor, beside the rest of AVX-512, and in what the compiler knew
}  // namespace avx512_bf16

// Those that this processor has the instructions for, the fastest first.
std::vector<SimdReduction*> simd_reductions();

// By the first that takes these; false where none does.
SimdReduction reduce_simd;

}  // namespace torchtp::collectives
