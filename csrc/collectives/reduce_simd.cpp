#include "collectives/reduce_simd.h"

#include <algorithm>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace torchtp::collectives {

std::vector<SimdReduction*> simd_reductions() {
  std::vector<SimdReduction*> found;
#if defined(__x86_64__)
  unsigned int a = 0, b = 0, c = 0, d = 0;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c) found.push_back(avx2::reduce);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) {
    // On Zen 4 the shorter vectors take 2.2 ns instead of 2.7 for a line of two inputs of fp16, 1.15 instead of 1.3 for
    // one of fp32; Intel's processors convert twice as many numbers a cycle by the longer ones.
    found.insert(__builtin_cpu_is("amd") ? found.end() : found.begin(), avx512::reduce);
    if (avx512_bf16::is_here()) found.insert(found.begin(), avx512_bf16::reduce);
  }
#endif
  return found;
}

bool reduce_simd(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count,
                 c10::ScalarType dtype, ReduceOp op, int divisor) {
  static const std::vector<SimdReduction*> reductions = simd_reductions();
  return std::any_of(reductions.begin(), reductions.end(),
                     [&](SimdReduction* reduction) { return reduction(outputs, inputs, count, dtype, op, divisor); });
}

}  // namespace torchtp::collectives
