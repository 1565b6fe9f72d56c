#if defined(__x86_64__)

#include <immintrin.h>

#define TORCHTP_TARGET __attribute__((target("avx2,f16c,fma")))
#define TORCHTP_VECTOR __attribute__((target("avx2,f16c,fma"), always_inline)) inline
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
  TORCHTP_VECTOR static __m128i round_fp16(Floats value) {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  TORCHTP_VECTOR static void store_fp16(uint16_t* out, __m128i value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), value);
  }

  TORCHTP_VECTOR static Floats even_bf16(Bits both) { return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16)); }
  TORCHTP_VECTOR static Floats odd_bf16(Bits both) {
    return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  TORCHTP_VECTOR static int hard_for_bf16(Floats a, Floats b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q));
  }
  TORCHTP_VECTOR static Bits pair_bf16(Floats even, Floats odd) {
    return _mm256_blend_epi16(_mm256_srli_epi32(rounded(even), 16), rounded(odd), 0xaa);
  }
  TORCHTP_VECTOR static Bits pair_any_bf16(Floats even, Floats odd) {
    return pair_bf16(without_payload(even), without_payload(odd));
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

 private:
  TORCHTP_VECTOR static Floats without_payload(Floats value) {
    const Floats is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_blendv_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), is_nan);
  }
  // In the upper half.
  TORCHTP_VECTOR static Bits rounded(Floats value) {
    const Bits bits = _mm256_castps_si256(value);
    const Bits odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  }
};

// Conversions and sums share units of the processor; a multiply-add, which is as exact, has others.
struct Avx2Fp16 : Avx2 {
  TORCHTP_VECTOR static Floats add(Floats a, Floats b) { return _mm256_fmadd_ps(a, _mm256_set1_ps(1.0f), b); }
};

}  // namespace

bool avx2::reduce(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count,
                  c10::ScalarType dtype, ReduceOp op, int divisor) {
  return reduce_floats<Avx2, Avx2Fp16>(outputs, inputs, count, dtype, op, divisor);
}

}  // namespace torchtp::collectives

#endif
