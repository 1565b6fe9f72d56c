#pragma once

// The vectors of AVX-512, for a file that has defined TORCHTP_TARGET and TORCHTP_VECTOR (see reduce_simd_loops.h).

// GCC 12 warns of its own avx512fintrin.h (its bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "collectives/reduce_simd_loops.h"

namespace torchtp::collectives {
namespace {

struct Avx512 {
  static constexpr int64_t kLanes = 16;
  using Floats = __m512;
  using Bits = __m512i;

  TORCHTP_VECTOR static Floats load(const float* in) { return _mm512_loadu_ps(in); }
  TORCHTP_VECTOR static void store(float* out, Floats value) { _mm512_storeu_ps(out, value); }
  TORCHTP_VECTOR static Bits load_bits(const uint16_t* in) { return _mm512_loadu_si512(in); }
  TORCHTP_VECTOR static void store_bits(uint16_t* out, Bits value) { _mm512_storeu_si512(out, value); }

  TORCHTP_VECTOR static Floats load_fp16(const uint16_t* in) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
  }
  TORCHTP_VECTOR static __m256i round_fp16(Floats value) {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  TORCHTP_VECTOR static void store_fp16(uint16_t* out, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), value);
  }

  TORCHTP_VECTOR static Floats even_bf16(Bits both) { return _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)); }
  TORCHTP_VECTOR static Floats odd_bf16(Bits both) {
    return _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  TORCHTP_VECTOR static __mmask16 hard_for_bf16(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  TORCHTP_VECTOR static Bits pair_bf16(Floats even, Floats odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded(even), 16), rounded(odd));
  }
  TORCHTP_VECTOR static Bits pair_any_bf16(Floats even, Floats odd) {
    return pair_bf16(without_payload(even), without_payload(odd));
  }

  TORCHTP_VECTOR static Floats broadcast(float value) { return _mm512_set1_ps(value); }
  TORCHTP_VECTOR static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  TORCHTP_VECTOR static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  TORCHTP_VECTOR static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  template <bool kSmaller>
  TORCHTP_VECTOR static Floats select(Floats a, Floats b) {
    constexpr int kBetter = kSmaller ? _CMP_LT_OQ : _CMP_GT_OQ;
    const __mmask16 keep = _mm512_cmp_ps_mask(a, b, kBetter) | _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(keep, b, a);
  }

 private:
  TORCHTP_VECTOR static Floats without_payload(Floats value) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(is_nan, value, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
  }
  // In the upper half.
  TORCHTP_VECTOR static Bits rounded(Floats value) {
    const Bits bits = _mm512_castps_si512(value);
    const Bits odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  }
};

}  // namespace
}  // namespace torchtp::collectives
