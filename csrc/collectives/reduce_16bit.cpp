#include "collectives/reduce_16bit.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include <cstring>

#include "shm/group.h"

// Everything between the loads of a 16-bit number and its store stays in registers. Compilers do not see through the
// conversions of c10::Half and c10::BFloat16, element by element they take several times as long as the memory.
#define TORCHTP_VECTOR __attribute__((target("avx2,f16c"), always_inline)) inline

namespace torchtp::collectives {
namespace {

constexpr int64_t kLanes = 16;

// 16 numbers in fp32; which of the two holds which is the format's affair.
struct Wide {
  __m256 a, b;
};

struct Bf16 {
  // a: the even ones, b: the odd ones. So they never have to change places.
  TORCHTP_VECTOR static Wide load(const uint16_t* in) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000))))};
  }
  TORCHTP_VECTOR static void store(uint16_t* out, const Wide& value) {
    const __m256i both = _mm256_blend_epi16(_mm256_srli_epi32(rounded(value.a), 16), rounded(value.b), 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), both);
  }

 private:
  // In the upper half: the nearest bf16, to even; NaN stays NaN.
  TORCHTP_VECTOR static __m256i rounded(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(nearest, _mm256_set1_epi32(0x7fc00000), is_nan);
  }
};

struct Fp16 {
  TORCHTP_VECTOR static Wide load(const uint16_t* in) {
    const auto* const from = reinterpret_cast<const __m128i*>(in);
    return {_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
  }
  TORCHTP_VECTOR static void store(uint16_t* out, const Wide& value) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    auto* const to = reinterpret_cast<__m128i*>(out);
    _mm_storeu_si128(to, _mm256_cvtps_ph(value.a, kNearest));
    _mm_storeu_si128(to + 1, _mm256_cvtps_ph(value.b, kNearest));
  }
};

struct Sum {
  TORCHTP_VECTOR static __m256 apply(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
};

struct Product {
  TORCHTP_VECTOR static __m256 apply(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
};

// a where it is the smaller (larger) one or NaN.
template <int kBetter>
struct Select {
  TORCHTP_VECTOR static __m256 apply(__m256 a, __m256 b) {
    const __m256 keep = _mm256_or_ps(_mm256_cmp_ps(a, b, kBetter), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_ps(b, a, keep);
  }
};

template <typename Op>
TORCHTP_VECTOR Wide apply(const Wide& x, const Wide& y) {
  return {Op::apply(x.a, y.a), Op::apply(x.b, y.b)};
}

TORCHTP_VECTOR Wide divide(const Wide& x, __m256 divisor) {
  return {_mm256_div_ps(x.a, divisor), _mm256_div_ps(x.b, divisor)};
}

template <typename Format, typename Op>
__attribute__((target("avx2,f16c"))) void reduce_all(uint16_t* out, const std::vector<const std::byte*>& bytes,
                                                     int64_t count, bool average) {
  const size_t num_inputs = bytes.size();
  const uint16_t* inputs[shm::kMaxRanks];
  for (size_t r = 0; r < num_inputs; ++r) inputs[r] = reinterpret_cast<const uint16_t*>(bytes[r]);
  const __m256 divisor = _mm256_set1_ps(static_cast<float>(num_inputs));
  int64_t i = 0;
  if (num_inputs == 2 && !average) {  // the commonest case, without a loop inside the loop
    const uint16_t *const a = inputs[0], *const b = inputs[1];
    for (; i + kLanes <= count; i += kLanes) {
      Format::store(out + i, apply<Op>(Format::load(a + i), Format::load(b + i)));
    }
  }
  for (; i + kLanes <= count; i += kLanes) {
    Wide value = Format::load(inputs[0] + i);
    for (size_t r = 1; r < num_inputs; ++r) value = apply<Op>(value, Format::load(inputs[r] + i));
    Format::store(out + i, average ? divide(value, divisor) : value);
  }
  if (i == count) return;
  // The rest by the same instructions, so that a result does not depend on where its element lies.
  const size_t num_bytes = (count - i) * sizeof(uint16_t);
  uint16_t rest[kLanes] = {};
  Wide value{};
  for (size_t r = 0; r < num_inputs; ++r) {
    std::memcpy(rest, inputs[r] + i, num_bytes);
    value = r == 0 ? Format::load(rest) : apply<Op>(value, Format::load(rest));
  }
  Format::store(rest, average ? divide(value, divisor) : value);
  std::memcpy(out + i, rest, num_bytes);
}

bool has_instructions() {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

template <typename Format>
bool reduce_format(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, ReduceOp op) {
  auto* const numbers = reinterpret_cast<uint16_t*>(out);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum:
      reduce_all<Format, Sum>(numbers, inputs, count, false);
      return true;
    case ReduceOp::kAvg:
      reduce_all<Format, Sum>(numbers, inputs, count, true);
      return true;
    case ReduceOp::kProduct:
      reduce_all<Format, Product>(numbers, inputs, count, false);
      return true;
    case ReduceOp::kMin:
      reduce_all<Format, Select<_CMP_LT_OQ>>(numbers, inputs, count, false);
      return true;
    case ReduceOp::kMax:
      reduce_all<Format, Select<_CMP_GT_OQ>>(numbers, inputs, count, false);
      return true;
    default:
      return false;
  }
}

}  // namespace

bool reduce_16bit(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, c10::ScalarType dtype,
                  ReduceOp op) {
  static const bool possible = has_instructions();
  if (!possible || inputs.size() > shm::kMaxRanks) return false;
  return dtype == c10::ScalarType::Half ? reduce_format<Fp16>(out, inputs, count, op)
                                        : reduce_format<Bf16>(out, inputs, count, op);
}

}  // namespace torchtp::collectives

#undef TORCHTP_VECTOR

#else

namespace torchtp::collectives {

bool reduce_16bit(std::byte*, const std::vector<const std::byte*>&, int64_t, c10::ScalarType, ReduceOp) {
  return false;
}

}  // namespace torchtp::collectives

#endif
