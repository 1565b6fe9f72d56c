#pragma once

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "core/host_device.h"

namespace torchtp::kernels {

// Some elements side by side, moved by one instruction.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

// Some numbers of one thread.
template <int kVector>
struct Vector {
  float values[kVector];

  TORCHTP_HOST_DEVICE float total() const {
    float sum = values[0];
#pragma unroll
    for (int k = 1; k < kVector; ++k) sum += values[k];
    return sum;
  }
};
template <int kVector>
TORCHTP_HOST_DEVICE Vector<kVector> operator+(const Vector<kVector>& a, const Vector<kVector>& b) {
  Vector<kVector> sum;
#pragma unroll
  for (int k = 0; k < kVector; ++k) sum.values[k] = a.values[k] + b.values[k];
  return sum;
}

// By one instruction for certain: a pack that is merely copied may be loaded element by element where each is used.
template <typename Elements>
TORCHTP_HOST_DEVICE Elements load_pack(const Elements* from) {
#ifdef __CUDA_ARCH__
  Elements elements;
  if constexpr (sizeof(Elements) == 16) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    memcpy(&elements, &words, sizeof(words));
    return elements;
  } else if constexpr (sizeof(Elements) == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    memcpy(&elements, &words, sizeof(words));
    return elements;
  } else if constexpr (sizeof(Elements) == 4) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(from);
    memcpy(&elements, &word, sizeof(word));
    return elements;
  }
#endif
  return *from;
}
template <typename Elements>
TORCHTP_HOST_DEVICE void store_pack(Elements* to, const Elements& elements) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Elements) == 16) {
    uint4 words;
    memcpy(&words, &elements, sizeof(words));
    *reinterpret_cast<uint4*>(to) = words;
    return;
  } else if constexpr (sizeof(Elements) == 8) {
    uint2 words;
    memcpy(&words, &elements, sizeof(words));
    *reinterpret_cast<uint2*>(to) = words;
    return;
  } else if constexpr (sizeof(Elements) == 4) {
    uint32_t word;
    memcpy(&word, &elements, sizeof(word));
    *reinterpret_cast<uint32_t*>(to) = word;
    return;
  }
#endif
  *to = elements;
}

// Between what is stored and what is computed with.
template <typename T, int kCount>
TORCHTP_HOST_DEVICE Vector<kCount> widened(const Pack<T, kCount>& pack) {
  Vector<kCount> wide;
#ifdef __CUDA_ARCH__
  constexpr bool kByWords = std::is_same_v<T, c10::BFloat16> && kCount % 2 == 0;
#else
  constexpr bool kByWords = false;
#endif
  if constexpr (kByWords) {  // bfloat16 is the upper half of a float: one instruction each
#ifdef __CUDA_ARCH__
    uint32_t words[kCount / 2];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (int k = 0; k < kCount; k += 2) {
      wide.values[k] = __uint_as_float(words[k / 2] << 16);
      wide.values[k + 1] = __uint_as_float(words[k / 2] & 0xffff0000u);
    }
#endif
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) wide.values[k] = static_cast<float>(pack.values[k]);
  }
  return wide;
}

// A pack that stays in registers for a while, in words: elements of two bytes would be taken apart for it.
template <typename Elements>
struct Kept {
  using Word = std::conditional_t<sizeof(Elements) % 4 == 0, uint32_t, uint16_t>;
  Word words[sizeof(Elements) / sizeof(Word)];

  Kept() = default;
  TORCHTP_HOST_DEVICE Kept(const Elements& elements) { memcpy(words, &elements, sizeof(words)); }
  TORCHTP_HOST_DEVICE operator Elements() const {
    Elements elements;
    memcpy(&elements, words, sizeof(words));
    return elements;
  }
};
template <typename T, int kCount>
TORCHTP_HOST_DEVICE Vector<kCount> widened(const Kept<Pack<T, kCount>>& kept) {
  return widened(static_cast<Pack<T, kCount>>(kept));
}

// Starts to copy from global to shared memory; the thread has it after copies_arrived(), others once they met it then.
template <typename Elements>
TORCHTP_HOST_DEVICE void copy_ahead(Elements* to, const Elements* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(Elements) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
    return;
  } else if constexpr (sizeof(Elements) == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(from) : "memory");
    return;
  }
#endif
  *to = *from;
}
inline TORCHTP_HOST_DEVICE void copies_arrived() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Whether memory may be moved `count` elements at once along an innermost dim of that extent.
template <typename T>
bool aligned(int64_t innermost, int64_t count, std::initializer_list<const T*> pointers) {
  return innermost % count == 0 && std::all_of(pointers.begin(), pointers.end(), [&](const T* pointer) {
           return reinterpret_cast<uintptr_t>(pointer) % (count * sizeof(T)) == 0;
         });
}

}  // namespace torchtp::kernels
