#if defined(__x86_64__)

#define TORCHTP_TARGET __attribute__((target("avx512f,avx512bw")))
#define TORCHTP_VECTOR __attribute__((target("avx512f,avx512bw"), always_inline)) inline
#include "collectives/reduce_avx512.h"

namespace torchtp::collectives {

bool avx512::reduce(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count,
                    c10::ScalarType dtype, ReduceOp op, int divisor) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_format<Avx512, Fp32<Avx512>>(outputs, inputs, count, op, divisor);
    case c10::ScalarType::Half:
      return reduce_format<Avx512, Fp16<Avx512>>(outputs, inputs, count, op, divisor);
    case c10::ScalarType::BFloat16:
      return reduce_format<Avx512, Bf16<Avx512>>(outputs, inputs, count, op, divisor);
    default:
      return false;
  }
}

}  // namespace torchtp::collectives

#endif
