#if defined(__x86_64__)

#define TORCHTP_TARGET __attribute__((target("avx512f,avx512bw")))
#define TORCHTP_VECTOR __attribute__((target("avx512f,avx512bw"), always_inline)) inline
#include "collectives/reduce_avx512.h"

namespace torchtp::collectives {

bool avx512::reduce(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count,
                    c10::ScalarType dtype, ReduceOp op, int divisor) {
  return reduce_floats<Avx512>(outputs, inputs, count, dtype, op, divisor);
}

}  // namespace torchtp::collectives

#endif
