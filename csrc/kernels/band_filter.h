#pragma once

#include "kernels/band_shape.h"
#include "kernels/matrix_tile.h"

namespace torchtp::kernels {

// A plane's filter in shared memory as the right sides of products of 16 inputs with 8 outputs: rows of taps 16 numbers
// apart with zeros between and before them, so that the numbers from any distance to a row's first tap on are those of
// a column. Twice, the second time a number later: two neighbours from any number on are a word of one of them.
template <typename T, int kKernel>
struct BandFilter {
  static constexpr int kNumbers = 16 * (kKernel + 1);
  static constexpr int kApart = kNumbers + 16;  // so that what a warp reads of both lies in different banks
  static constexpr int kBoth = kApart + kNumbers;
  static constexpr int kRows = kKernel + 1;  // to write, the zeros before the first one among them

  // Two neighbours from number `first` of row ky on, counted from its first tap: at pair(filter, first) + 16 * ky.
  TORCHTP_HOST_DEVICE static const T* pair(const T* filter, int first) {
    return filter + 16 + first + (first & 1) * (kApart + 1);
  }

  // Row `row` of those to write of a filter at `to`; `taps` null: zeros.
  TORCHTP_HOST_DEVICE static void write_row(const T* taps, bool mirrored, int row, T* to) {
    const bool seen = taps && row > 0;
    uint32_t bits[18] = {};  // a zero before the taps, zeros behind them
#pragma unroll
    for (int i = 0; i < kKernel; ++i) {
      if (!seen) continue;
      const int tap = kKernel * (row - 1) + i;
      const T number = taps[mirrored ? kKernel * kKernel - 1 - tap : tap];
      uint16_t both;
      memcpy(&both, &number, sizeof(both));
      bits[1 + i] = both;
    }
#pragma unroll
    for (int later = 0; later < 2; ++later) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Chunk chunk;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = 8 * half + 2 * i + 1 - later;
          chunk.words[i] = bits[first] | bits[first + 1] << 16;
        }
        store_chunk(chunk, to + later * kApart + 16 * row + 8 * half);
      }
    }
  }
};

}  // namespace torchtp::kernels
