#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/divider.h"

// Tiles of 16-bit numbers in shared memory, as tensor cores read them: planes of rows of *chunks*, eight columns of
// 16 bytes each, whatever the layout of the tensor and wherever a row begins there.
namespace torchtp::kernels {

// A tile in shared memory: [planes][rows][pitch]. An odd number of chunks lies between rows, so that eight of them one
// below the other meet different banks; every eight planes are half of the banks further.
struct BandShape {
  int32_t planes, rows, chunks, pitch;
  int32_t apart;               // from plane to plane
  Divider by_rows, by_halves;  // rows of a plane; halves of a row's chunks

  // `least`: numbers that there is room for in the place of each plane.
  static BandShape make(int32_t planes, int32_t rows, int32_t chunks, int32_t least = 0) {
    const int32_t pitch = 8 * (chunks | 1), apart = rows * pitch > least ? rows * pitch : (least + 7) / 8 * 8;
    return {planes, rows, chunks, pitch, apart, Divider(rows), Divider(2 * chunks)};
  }
  TORCHTP_HOST_DEVICE int32_t plane(int32_t q) const { return q * apart + q / 8 * 32; }
  TORCHTP_HOST_DEVICE int32_t numel() const { return plane(planes); }
};

// Eight numbers of 16 bit.
struct alignas(16) Chunk {
  uint32_t words[4];
};

// By one instruction for certain, whatever the compiler makes of copying the numbers.
template <typename Words, typename T>
TORCHTP_HOST_DEVICE Words load_words(const T* from) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Words) == 16) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    return {{four.x, four.y, four.z, four.w}};
  } else {
    return *reinterpret_cast<const Words*>(from);
  }
#else
  Words words;
  memcpy(&words, from, sizeof(words));
  return words;
#endif
}

template <typename Words, typename T>
TORCHTP_HOST_DEVICE void store_words(const Words& words, T* to) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Words) == 16) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words.words[0], words.words[1], words.words[2], words.words[3]);
  } else {
    *reinterpret_cast<Words*>(to) = words;
  }
#else
  memcpy(to, &words, sizeof(words));
#endif
}

template <typename T>
TORCHTP_HOST_DEVICE Chunk load_chunk(const T* from) {
  return load_words<Chunk>(from);
}
template <typename T>
TORCHTP_HOST_DEVICE void store_chunk(const Chunk& chunk, T* to) {
  store_words(chunk, to);
}
template <typename T>
TORCHTP_HOST_DEVICE uint32_t word_at(const T* from) {
  return load_words<uint32_t>(from);
}
template <typename T>
TORCHTP_HOST_DEVICE void set_word(T* to, uint32_t word) {
  store_words(word, to);
}

// Number `i` of a chunk; `i` known to the compiler.
template <typename T>
TORCHTP_HOST_DEVICE void set_number(Chunk& chunk, int i, T value) {
  uint16_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const uint32_t other = chunk.words[i / 2] & (i % 2 ? 0xffffu : 0xffff0000u);
  chunk.words[i / 2] = other | (i % 2 ? uint32_t{bits} << 16 : uint32_t{bits});
}

template <typename T>
TORCHTP_HOST_DEVICE T number(const Chunk& chunk, int i) {
  const auto bits = static_cast<uint16_t>(chunk.words[i / 2] >> (i % 2 * 16));
  T value;
  memcpy(&value, &bits, sizeof(bits));
  return value;
}

}  // namespace torchtp::kernels
