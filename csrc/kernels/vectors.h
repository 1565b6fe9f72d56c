#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

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
};
template <int kVector>
TORCHTP_HOST_DEVICE Vector<kVector> operator+(const Vector<kVector>& a, const Vector<kVector>& b) {
  Vector<kVector> sum;
#pragma unroll
  for (int k = 0; k < kVector; ++k) sum.values[k] = a.values[k] + b.values[k];
  return sum;
}

// Whether memory may be moved `count` elements at once along an innermost dim of that extent.
template <typename T>
bool aligned(int64_t innermost, int64_t count, std::initializer_list<const T*> pointers) {
  return innermost % count == 0 && std::all_of(pointers.begin(), pointers.end(), [&](const T* pointer) {
           return reinterpret_cast<uintptr_t>(pointer) % (count * sizeof(T)) == 0;
         });
}

}  // namespace torchtp::kernels
