#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/host_device.h"

// What a warp does together with matrices of 16-bit numbers in shared memory. Lane l holds, of a 16 x 8 matrix of sums,
// rows row_of(l) and row_of(l) + 8 of columns column_of(l) and the next one: sums[2 * lower + right]. The device has
// the tensor cores do it (sm_80 and later); who calls these on the CPU takes the same sums from shared memory itself.
namespace torchtp::kernels {

inline TORCHTP_HOST_DEVICE int row_of(int lane) { return lane / 4; }
inline TORCHTP_HOST_DEVICE int column_of(int lane) { return lane % 4 * 2; }

// Two numbers of 16 bit in a word, the first one low.
template <typename T>
TORCHTP_HOST_DEVICE uint32_t paired(float low, float high) {
  const T both[2] = {static_cast<T>(low), static_cast<T>(high)};
  uint32_t word;
  memcpy(&word, both, sizeof(word));
  return word;
}

// What follows from the number is not computed before what is written above, so that it needs no registers there.
inline TORCHTP_HOST_DEVICE void not_before([[maybe_unused]] int32_t& number) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(number));
#endif
}

#ifdef __CUDA_ARCH__

// Four 8 x 8 matrices, whose rows of 16 bytes begin where lanes 0 to 7, 8 to 15, ... point to; kTransposed: columns.
template <bool kTransposed>
__device__ __forceinline__ void load_four(const void* row, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
  }
}

// Two, by lanes 0 to 15.
template <bool kTransposed>
__device__ __forceinline__ void load_two(const void* row, uint32_t& a, uint32_t& b) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(a), "=r"(b)
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(a), "=r"(b)
                 : "r"(address)
                 : "memory");
  }
}

// sums [16, 8] += left [16, 16] * right [16, 8]; of left the matrices upper first, lower first, upper second, lower
// second half of the columns.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sums)[4], uint32_t left0, uint32_t left1, uint32_t left2,
                                             uint32_t left3, uint32_t right0, uint32_t right1) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left0), "r"(left1), "r"(left2), "r"(left3), "r"(right0), "r"(right1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left0), "r"(left1), "r"(left2), "r"(left3), "r"(right0), "r"(right1));
  }
}

#endif

}  // namespace torchtp::kernels
