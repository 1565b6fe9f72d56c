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

// Where results go: one buffer, or the same into several.
class Outputs {
 public:
  explicit Outputs(std::byte* const& only) : begin_(&only), end_(&only + 1) {}
  explicit Outputs(const std::vector<std::byte*>& all) : begin_(all.data()), end_(all.data() + all.size()) {}
  std::byte* const* begin() const { return begin_; }
  std::byte* const* end() const { return end_; }

 private:
  std::byte* const* begin_;
  std::byte* const* end_;
};

// out[i] = inputs[0][i] op inputs[1][i] op ..., in this order, 16-bit types in fp32 until the end; AVG divides the sum
// by the number of inputs, or by `divisor` if that is not 0 (integers truncate), MIN and MAX keep NaN. `out` may be one
// of the inputs.
void reduce_inputs(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, c10::ScalarType dtype,
                   ReduceOp op, int divisor = 0);

// The same for every one of `outputs`, each of which may be one of the inputs.
void reduce_inputs(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count,
                   c10::ScalarType dtype, ReduceOp op, int divisor = 0);

// The op between partial results, and the dtype that they need so that the end has the same digits as of one step.
ReduceOp partial_op(ReduceOp op);
c10::ScalarType partial_dtype(c10::ScalarType dtype, ReduceOp op);

}  // namespace torchtp::collectives
