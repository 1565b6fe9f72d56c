#if defined(__x86_64__)

#include <immintrin.h>

#define TORCHTP_TARGET __attribute__((target("avx2,f16c")))
#define TORCHTP_VECTOR __attribute__((target("avx2,f16c"), always_inline)) inline
#include "collectives/reduce_simd_loops.h"

namespace torchtp::collectives {
namespace {

struct Avx2 {
  static constexpr int64_t kLanes = 8;
  using Floats = __m256;
  using Bits = __m256i;

  TORCHTP_VECTOR static Floats load(const float* in) { return _mm256_loadu_ps(in); }
  TORCHTP_VECTOR static void store(float* out, Floats value) { _mm256_storeu_ps(out, value); }
  TORCHTP_VECTOR static Bits load_bits(const uint16_t* in) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
  }
  TORCHTP_VECTOR static void store_bits(uint16_t* out, Bits value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), value);
  }

  TORCHTP_VECTOR static Floats load_fp16(const uint16_t* in) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
  }
  TORCHTP_VECTOR static void store_fp16(uint16_t* out, Floats value) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(value, kNearest));
  }

  TORCHTP_VECTOR static Floats even_bf16(Bits both) { return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16)); }
  TORCHTP_VECTOR static Floats odd_bf16(Bits both) {
    return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  // In the upper half: the nearest bf16, to even; NaN stays NaN.
  TORCHTP_VECTOR static Bits round_bf16(Floats value) {
    const Bits bits = _mm256_castps_si256(value);
    const Bits odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const Bits nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const Bits is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7fc00000), is_nan);
  }
  TORCHTP_VECTOR static Bits pair_bf16(Bits even, Bits odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
  }

  TORCHTP_VECTOR static Floats broadcast(float value) { return _mm256_set1_ps(value); }
  TORCHTP_VECTOR static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  TORCHTP_VECTOR static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  TORCHTP_VECTOR static Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  template <bool kSmaller>
  TORCHTP_VECTOR static Floats select(Floats a, Floats b) {
    constexpr int kBetter = kSmaller ? _CMP_LT_OQ : _CMP_GT_OQ;
    const Floats keep = _mm256_or_ps(_mm256_cmp_ps(a, b, kBetter), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_ps(b, a, keep);
  }
};

}  // namespace

bool avx2::reduce(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, c10::ScalarType dtype,
                  ReduceOp op, int divisor) {
  return reduce_floats<Avx2>(out, inputs, count, dtype, op, divisor);
}

}  // namespace torchtp::collectives

#endif
