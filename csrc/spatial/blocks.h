#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

namespace torchtp::spatial {

// Rows of a dense tensor's dim: `num_blocks` runs of `block_bytes`, `stride_bytes` apart. The runs in their order are a
// message's payload.
struct Blocks {
  std::byte* data;
  size_t num_blocks;
  size_t block_bytes;
  size_t stride_bytes;

  size_t num_bytes() const { return num_blocks * block_bytes; }

  // Calls run(memory, offset in the piece, bytes) for each contiguous run of the payload's piece [offset, offset +
  // num_bytes). A halo of a few columns is many thousand runs of a few bytes: their size is a constant to the compiler
  // (a std::integral_constant), and as the processor does not foresee lines so far apart, they are asked for
  // beforehand.
  template <typename Run>
  void for_each(size_t offset, size_t num_bytes, const Run& run) const {
    if (num_bytes == 0) return;
    size_t block = offset / block_bytes, done = 0;
    if (const size_t inside = offset % block_bytes; inside != 0) {
      done = std::min(block_bytes - inside, num_bytes);
      run(data + block * stride_bytes + inside, size_t{0}, done);
      ++block;
    }
    const size_t whole = (num_bytes - done) / block_bytes;
    with_constant(block_bytes, [&](auto bytes) {
      std::byte* from = data + block * stride_bytes;
      const size_t asked = stride_bytes >= kFarBytes && whole > kAhead ? whole - kAhead : 0;
      for (size_t i = 0; i < asked; ++i, from += stride_bytes, done += bytes) {
        __builtin_prefetch(from + kAhead * stride_bytes);
        run(from, done, bytes);
      }
      for (size_t i = asked; i < whole; ++i, from += stride_bytes, done += bytes) run(from, done, bytes);
    });
    block += whole;
    if (done < num_bytes) run(data + block * stride_bytes, done, num_bytes - done);
  }

 private:
  static constexpr size_t kFarBytes = 256;
  static constexpr size_t kAhead = 16;

  template <size_t kBytes>
  using Constant = std::integral_constant<size_t, kBytes>;

  template <typename Body>
  static void with_constant(size_t bytes, const Body& body) {
    switch (bytes) {
      case 2:
        return body(Constant<2>());
      case 4:
        return body(Constant<4>());
      case 6:
        return body(Constant<6>());
      case 8:
        return body(Constant<8>());
      case 12:
        return body(Constant<12>());
      case 16:
        return body(Constant<16>());
      case 24:
        return body(Constant<24>());
      case 32:
        return body(Constant<32>());
      default:
        body(bytes);
    }
  }
};

}  // namespace torchtp::spatial
