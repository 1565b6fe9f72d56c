#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_meeting.h"
#include "kernels/halo_row.h"
#include "kernels/tile_grid.h"
#include "kernels/vectors.h"

namespace torchtp::kernels {

// A convolution with a stride of 2, channels first, whose windows begin kKernel / 2 before every second column, as they
// usually do: the eight columns that four outputs share with nobody begin at a multiple of eight, and go by one load or
// two. Without shared memory: columns beside them, and rows that others read too, come from the cache.
template <typename T, int kKernel>
struct DepthwiseRows : NoTeams {
  using Meeting = ForwardMeeting<kKernel, 2>;
  static constexpr int kThreads = 256, kBlocksPerSm = kKernel == 3 ? 3 : 2;
  static constexpr int kStepPhases = 1, kPhases = 1;
  static constexpr int kRows = 4, kColumns = 4, kTaps = kKernel * kKernel;
  static constexpr int kWindow = Meeting::rows(kColumns), kWindowRows = Meeting::rows(kRows);
  static constexpr int kMiddle = 2 * kColumns, kBefore = kKernel / 2, kBehind = kWindow - kMiddle - kBefore;
  static constexpr int kLoad = 16 / sizeof(T) < kMiddle ? 16 / sizeof(T) : kMiddle;
  using State = NoState;

  // A row of the window as it was read.
  struct Row {
    T before[kBefore];
    Kept<Pack<T, kLoad>> middle[kMiddle / kLoad];
    T behind[kBehind > 0 ? kBehind : 1];

    TORCHTP_HOST_DEVICE void widen(float (&window)[kWindow]) const {
#pragma unroll
      for (int i = 0; i < kBefore; ++i) window[i] = static_cast<float>(before[i]);
#pragma unroll
      for (int i = 0; i < kMiddle / kLoad; ++i) {
        const Vector<kLoad> wide = widened(middle[i]);
#pragma unroll
        for (int k = 0; k < kLoad; ++k) window[kBefore + i * kLoad + k] = wide.values[k];
      }
#pragma unroll
      for (int i = 0; i < kBehind; ++i) window[kBefore + kMiddle + i] = static_cast<float>(behind[i]);
    }
  };

  HaloPlanes<T> in;
  const T* weight;
  const T* bias;
  T* out;
  int64_t batches;
  int32_t out_height, out_width, offset_y;
  bool stores_four;
  TileGrid grid;
  Divider channels;

  static bool fits(const HaloPlanes<T>& in, const DepthwiseParams& params, const Regions& regions) {
    return params.x.offset == kBefore && regions.first.x0 % kColumns == 0 && regions.second.x0 % kColumns == 0 &&
           aligned<T>(in.width, kMiddle, {in.own, in.above, in.below});
  }
  static DepthwiseRows make(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                            const DepthwiseParams& params, const Regions& regions) {
    return {{},
            in,
            weight,
            bias,
            out,
            params.batches,
            params.out_height,
            params.out_width,
            params.y.offset,
            aligned<T>(params.out_width, kColumns, {out}),
            tile_grid(8, 0, true, kRows, kColumns, 5, regions),
            Divider(in.channels)};
  }

  TORCHTP_HOST_DEVICE int64_t num_planes() const { return batches * in.channels; }
  int64_t num_blocks() const { return ((num_planes() + grid.planes() - 1) >> grid.log_planes) * grid.tiles(); }
  size_t shared_bytes() const { return 0; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State&, void*) const {
    const auto block = static_cast<int32_t>(place.block), group = grid.all.quotient(block);
    const Region tile = grid.tile(block - group * grid.all.divisor);
    const int32_t tx = place.thread & ((1 << grid.log_x) - 1);
    const int32_t ty = (place.thread >> grid.log_x) & ((1 << grid.log_y) - 1);
    const int64_t plane = (int64_t{group} << grid.log_planes) + (place.thread >> (grid.log_x + grid.log_y));
    const int32_t y = tile.y0 + ty * kRows, x = tile.x0 + tx * kColumns;
    const bool left_over = place.thread >> (grid.log_x + grid.log_y) >= grid.planes();
    if (left_over || plane >= num_planes() || y >= tile.y1 || x >= tile.x1) return;
    convolve(plane, y, x, tile);
  }

 private:
  // kPlain: all of it is in own columns of an own row.
  template <bool kPlain>
  TORCHTP_HOST_DEVICE Row load(int64_t plane, int32_t y, int32_t x) const {
    Row row = {};
    if constexpr (kPlain) {
      const T* const from = in.own + in.template own_index<false>(plane, 0, y, x);
      load_middle(from, row);
#pragma unroll
      for (int i = 0; i < kBefore; ++i) row.before[i] = from[i - kBefore];
#pragma unroll
      for (int i = 0; i < kBehind; ++i) row.behind[i] = from[kMiddle + i];
      return row;
    }
    const HaloRow<T> pieces(in, plane, y, 1);
    const auto value = [&](int32_t column) {
      const T* const from = pieces.at(in, column);
      return from ? *from : T{};
    };
    if (pieces.middle && x < in.width) {
      load_middle(pieces.middle + x, row);
    } else {
#pragma unroll
      for (int i = 0; i < kMiddle; i += kLoad) {
        Pack<T, kLoad> some;
#pragma unroll
        for (int k = 0; k < kLoad; ++k) some.values[k] = value(x + i + k);
        row.middle[i / kLoad] = some;
      }
    }
#pragma unroll
    for (int i = 0; i < kBefore; ++i) row.before[i] = value(x - kBefore + i);
#pragma unroll
    for (int i = 0; i < kBehind; ++i) row.behind[i] = value(x + kMiddle + i);
    return row;
  }
  static TORCHTP_HOST_DEVICE void load_middle(const T* from, Row& row) {
#pragma unroll
    for (int i = 0; i < kMiddle / kLoad; ++i) {
      row.middle[i] = load_pack(reinterpret_cast<const Pack<T, kLoad>*>(from + i * kLoad));
    }
  }

  TORCHTP_HOST_DEVICE void convolve(int64_t plane, int32_t y, int32_t x, const Region& tile) const {
    const int32_t first = Meeting::first_row(y, offset_y), middle = 2 * x;
    const bool plain =
        first >= 0 && first + kWindowRows <= in.height && middle >= kBefore && middle + kMiddle + kBehind <= in.width;
    if (plain) {
      convolve<true>(plane, y, x, tile);
    } else {
      convolve<false>(plane, y, x, tile);
    }
  }

  template <bool kPlain>
  TORCHTP_HOST_DEVICE void convolve(int64_t plane, int32_t y, int32_t x, const Region& tile) const {
    const int32_t c = channels.rest(static_cast<int32_t>(plane));
    float filter[kTaps];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) filter[i] = static_cast<float>(weight[int64_t{c} * kTaps + i]);
    const float start = bias ? static_cast<float>(bias[c]) : 0.0f;
    float sums[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[r][j] = start;
    }
    const int32_t y0 = Meeting::first_row(y, offset_y), middle = 2 * x;
    Row ahead = load<kPlain>(plane, y0, middle);
#pragma unroll
    for (int v = 0; v < kWindowRows; ++v) {
      float window[kWindow];
      ahead.widen(window);
      if (v + 1 < kWindowRows) ahead = load<kPlain>(plane, y0 + v + 1, middle);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int ky = Meeting::slot(r, v);
        if (ky < 0) continue;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int kx = 0; kx < kKernel; ++kx) sums[r][j] += window[2 * j + kx] * filter[ky * kKernel + kx];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (y + r >= tile.y1) return;
      T* const to = out + (plane * out_height + y + r) * out_width + x;
      Pack<T, kColumns> four;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) four.values[j] = static_cast<T>(sums[r][j]);
      if (stores_four && x + kColumns <= tile.x1) {
        store_pack(reinterpret_cast<Pack<T, kColumns>*>(to), four);
        continue;
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (x + j < tile.x1) to[j] = four.values[j];
      }
    }
  }
};

}  // namespace torchtp::kernels
