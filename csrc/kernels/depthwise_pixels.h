#pragma once

#include <type_traits>

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_meeting.h"
#include "kernels/pixel_lanes.h"
#include "kernels/tile_grid.h"

namespace torchtp::kernels {

// What DepthwiseTile computes, channels last, for few taps: memory is the limit there, and a window in shared memory
// costs more than reading neighbours twice from the cache. A thread keeps the filters of kVector channels and kRows x
// kColumns of their outputs; while a row of the window meets them, the next one is on its way.
template <typename T, int kKernel, int kStride, bool kInputGrad>
struct DepthwisePixels : NoTeams {
  using Meeting = std::conditional_t<kInputGrad, GradMeeting<kKernel, kStride>, ForwardMeeting<kKernel, kStride>>;
  static constexpr int kThreads = 256, kBlocksPerSm = 2;
  static constexpr int kStepPhases = 2, kPhases = 2;
  static constexpr int kVector = 4;
  static constexpr int kRows = kInputGrad ? 2 : kStride == 1 ? 4 : 3, kColumns = kInputGrad ? 4 : 2;
  static constexpr int kTaps = kKernel * kKernel, kSlots = Meeting::kSlots, kFilter = kSlots * kSlots;
  static constexpr int kWindow = Meeting::rows(kColumns), kWindowRows = Meeting::rows(kRows);
  using State = NoState;
  using Channels = Pack<T, kVector>;

  HaloPlanes<T> in;
  const T* weight;
  const T* bias;
  T* out;
  int64_t batches;
  int32_t out_height, out_width, offset_y, offset_x;
  bool mirrored;  // taps in reverse order
  bool wide_in, wide_out;
  TileGrid grid;
  PixelLanes<kThreads, kVector> lanes;

  static DepthwisePixels make(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                              const DepthwiseParams& params, const Regions& regions, bool mirrored) {
    // A thread a tile.
    const TileGrid grid = tile_grid(0, 0, false, kRows, kColumns, 0, regions, {params.y.dilation, params.x.dilation});
    return {{},
            in,
            weight,
            bias,
            out,
            params.batches,
            params.out_height,
            params.out_width,
            params.y.offset,
            params.x.offset,
            mirrored,
            loads_packs(in, kVector),
            aligned<T>(in.channels, kVector, {out}),
            grid,
            {in.channels, grid.tiles()}};
  }

  int64_t num_blocks() const {
    return grid.tiles() == 0 ? 0 : batches * lanes.tile_groups.divisor * lanes.chunks.divisor;
  }
  size_t shared_bytes() const { return sizeof(float) * kTaps * lanes.block_channels(); }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State&, void* shared) const {
    const auto block = static_cast<int32_t>(place.block), group = lanes.chunks.quotient(block);
    const int32_t first_channel = (block - group * lanes.chunks.divisor) * lanes.block_channels();
    float* const filters = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      bring_filters(place.thread, first_channel, filters);
    } else {
      const int32_t n = lanes.tile_groups.quotient(group);
      const int32_t index = (group - n * lanes.tile_groups.divisor) * lanes.spots() + lanes.spot(place.thread);
      const int32_t lane = lanes.lane_channel(place.thread);
      if (index >= grid.tiles() || first_channel + lane >= in.channels) return;
      convolve(n, first_channel + lane, grid.tile(index), filters + lane);
    }
  }

 private:
  // [tap][channel of the block].
  TORCHTP_HOST_DEVICE void bring_filters(int thread, int32_t first_channel, float* filters) const {
    for (int32_t i = thread; i < kTaps * lanes.block_channels(); i += kThreads) {
      const int32_t q = i / kTaps, tap = i - q * kTaps;
      const bool there = first_channel + q < in.channels;
      const int64_t at = int64_t{first_channel + q} * kTaps + (mirrored ? kTaps - 1 - tap : tap);
      filters[tap * lanes.block_channels() + q] = there ? static_cast<float>(weight[at]) : 0;
    }
  }

  TORCHTP_HOST_DEVICE Vector<kVector> filter_at(int32_t slot, const Region& tile, const float* filters) const {
    const int32_t ky = Meeting::tap(slot / kSlots, tile.y0, offset_y);
    const int32_t kx = Meeting::tap(slot % kSlots, tile.x0, offset_x);
    if (kInputGrad && (ky < 0 || ky >= kKernel || kx < 0 || kx >= kKernel)) return {};
    return widened(load_pack(
        reinterpret_cast<const Pack<float, kVector>*>(filters + (ky * kKernel + kx) * lanes.block_channels())));
  }

  TORCHTP_HOST_DEVICE void convolve(int64_t n, int32_t c, const Region& tile, const float* filters) const {
    // A stride has no dilation: the window's rows and columns are as far apart as the outputs, or side by side.
    const Steps steps = kStride == 1 ? grid.steps : Steps{};
    const int32_t y0 = Meeting::first_row(tile.y0, offset_y), x0 = Meeting::first_row(tile.x0, offset_x);
    const PixelWindow<kVector, T> window{in, wide_in, n, y0, x0, steps.y, steps.x, c};
    if (window.plain(kWindowRows, kWindow)) {
      convolve<true>(window, tile, filters);
    } else {
      convolve<false>(window, tile, filters);
    }
  }

  template <bool kPlain>
  TORCHTP_HOST_DEVICE void convolve(const PixelWindow<kVector, T>& seen, const Region& tile,
                                    const float* filters) const {
    Vector<kVector> filter[kFilter];
#pragma unroll
    for (int i = 0; i < kFilter; ++i) filter[i] = filter_at(i, tile, filters);
    Vector<kVector> start = {};
    if (bias) start = widened(load_channels<kVector>(bias, seen.c, in.channels, false));
    Vector<kVector> sums[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[r][j] = start;
    }

    Kept<Channels> ahead[kWindow];
    if (kPlain) seen.template load_row<kPlain>(0, ahead);
#pragma unroll
    for (int v = 0; v < kWindowRows; ++v) {
      if (!kPlain) seen.template load_row<kPlain>(v, ahead);
      Vector<kVector> window[kWindow];
#pragma unroll
      for (int u = 0; u < kWindow; ++u) window[u] = widened(ahead[u]);
      if (kPlain && v + 1 < kWindowRows) seen.template load_row<kPlain>(v + 1, ahead);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int ky = Meeting::slot(r, v);
        if (ky < 0) continue;
#pragma unroll
        for (int u = 0; u < kWindow; ++u) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const int kx = Meeting::slot(j, u);
            if (kx < 0) continue;
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
              sums[r][j].values[k] += window[u].values[k] * filter[ky * kSlots + kx].values[k];
            }
          }
        }
      }
    }
    store(seen.n, seen.c, tile, sums);
  }

  TORCHTP_HOST_DEVICE void store(int64_t n, int32_t c, const Region& tile,
                                 const Vector<kVector> (&sums)[kRows][kColumns]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int32_t y = tile.y0 + r * grid.steps.y;
      if (y >= tile.y1) return;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int32_t x = tile.x0 + j * grid.steps.x;
        if (x >= tile.x1) break;
        T* const to = out + ((n * out_height + y) * out_width + x) * in.channels + c;
        Channels pack;
#pragma unroll
        for (int k = 0; k < kVector; ++k) pack.values[k] = static_cast<T>(sums[r][j].values[k]);
        if (wide_out) {
          store_pack(reinterpret_cast<Channels*>(to), pack);
          continue;
        }
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          if (c + k < in.channels) to[k] = pack.values[k];
        }
      }
    }
  }
};

}  // namespace torchtp::kernels
