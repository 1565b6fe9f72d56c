#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_meeting.h"
#include "kernels/pixel_lanes.h"
#include "kernels/tile_grid.h"

namespace torchtp::kernels {

// What DepthwiseWeightTile computes, channels last, for few taps; see DepthwisePixels. A thread keeps the sums of
// kVector channels' filters and takes kRows x kColumns points at a time.
template <typename T, int kKernel, int kStride>
struct DepthwiseWeightPixels : NoTeams {
  using Meeting = ForwardMeeting<kKernel, kStride>;
  static constexpr int kThreads = 256, kBlocksPerSm = 2;
  static constexpr int64_t kEnoughBlocks = 1024;
  static constexpr int kStepPhases = 1, kPhases = 3;
  static constexpr int kVector = 4;
  static constexpr int kRows = 2, kColumns = 2, kTaps = kKernel * kKernel;
  static constexpr int kWindow = Meeting::rows(kColumns), kWindowRows = Meeting::rows(kRows);
  struct State {
    Vector<kVector> sums[kTaps];
  };
  static constexpr kernels::Meeting meets(int phase) {
    return phase == 0 ? kernels::Meeting::kNobody : kernels::Meeting::kBlock;
  }

  HaloPlanes<T> points;
  HaloPlanes<T> window;
  float* partial;  // [splits, C, kTaps]
  int32_t offset_y, offset_x;
  int32_t splits;
  bool mirrored, wide_points, wide_window;
  TileGrid grid;
  PixelLanes<kThreads, kVector> lanes;
  int32_t each, more;  // units of a split; so many of them have one more

  static DepthwiseWeightPixels make(const HaloPlanes<T>& points, const HaloPlanes<T>& window, float* partial,
                                    int64_t batches, int32_t offset_y, int32_t offset_x, Steps steps, bool mirrored) {
    const Regions regions{{points.first_row(), points.end_row(), points.first_column(), points.end_column()}, {}};
    DepthwiseWeightPixels program{};
    program.points = points;
    program.window = window;
    program.partial = partial;
    program.offset_y = offset_y;
    program.offset_x = offset_x;
    program.mirrored = mirrored;
    program.wide_points = loads_packs(points, kVector);
    program.wide_window = loads_packs(window, kVector);
    program.grid = tile_grid(0, 0, false, kRows, kColumns, 0, regions, steps);  // a thread a tile
    program.lanes = {points.channels, program.grid.tiles()};
    const auto units = static_cast<int32_t>(batches * program.lanes.tile_groups.divisor);
    program.splits = splits_of(units, program.lanes.chunks.divisor);
    program.each = program.splits > 0 ? units / program.splits : 0;
    program.more = units - program.each * program.splits;
    return program;
  }

  // By the problem alone: some units for each block, and enough blocks for any device.
  static int32_t splits_of(int64_t units, int64_t chunks) {
    const int64_t most = (units + 3) / 4, enough = (kEnoughBlocks + chunks - 1) / chunks;
    return static_cast<int32_t>(most < enough ? most : enough);
  }
  int64_t num_blocks() const { return int64_t{lanes.chunks.divisor} * splits; }
  size_t shared_bytes() const { return sizeof(float) * kThreads * kTaps * kVector; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t block) const {
    return each + (lanes.chunks.quotient(static_cast<int32_t>(block)) < more);
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    const auto block = static_cast<int32_t>(place.block), split = lanes.chunks.quotient(block);
    const int32_t first_channel = (block - split * lanes.chunks.divisor) * lanes.block_channels();
    float* const memory = static_cast<float*>(shared);
    const int32_t lane = lanes.lane_channel(place.thread);
    if constexpr (kPhase == 0) {
      const int32_t unit = split * each + (split < more ? split : more) + step;
      const int32_t n = lanes.tile_groups.quotient(unit);
      const int32_t index = (unit - n * lanes.tile_groups.divisor) * lanes.spots() + lanes.spot(place.thread);
      if (index >= grid.tiles() || first_channel + lane >= points.channels) return;
      multiply(n, first_channel + lane, grid.tile(index), state);
    } else if constexpr (kPhase == 1) {  // [spot][tap][channel of the block]
      float* const to = memory + lanes.spot(place.thread) * kTaps * lanes.block_channels() + lane;
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) to[tap * lanes.block_channels() + k] = state.sums[tap].values[k];
      }
    } else {
      add_spots(place.thread, split, first_channel, memory);
    }
  }

 private:
  TORCHTP_HOST_DEVICE void multiply(int64_t n, int32_t c, const Region& tile, State& state) const {
    const Steps steps = kStride == 1 ? grid.steps : Steps{};
    const int32_t y0 = Meeting::first_row(tile.y0, offset_y), x0 = Meeting::first_row(tile.x0, offset_x);
    const PixelWindow<kVector, T> here{points, wide_points, n, tile.y0, tile.x0, steps.y, steps.x, c};
    const PixelWindow<kVector, T> around{window, wide_window, n, y0, x0, steps.y, steps.x, c};
    if (here.plain(kRows, kColumns) && around.plain(kWindowRows, kWindow)) {
      multiply<true>(here, around, state);
    } else {
      multiply<false>(here, around, state);
    }
  }

  template <bool kPlain>
  TORCHTP_HOST_DEVICE void multiply(const PixelWindow<kVector, T>& here, const PixelWindow<kVector, T>& around,
                                    State& state) const {
    Kept<Pack<T, kVector>> mine[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) here.template load_row<kPlain>(r, mine[r]);
#pragma unroll
    for (int v = 0; v < kWindowRows; ++v) {
      Kept<Pack<T, kVector>> row[kWindow];
      around.template load_row<kPlain>(v, row);
#pragma unroll
      for (int u = 0; u < kWindow; ++u) {
        const Vector<kVector> seen = widened(row[u]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const int ky = Meeting::slot(r, v), kx = Meeting::slot(j, u);
            if (ky < 0 || kx < 0) continue;
            const Vector<kVector> point = widened(mine[r][j]);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
              state.sums[ky * kKernel + kx].values[k] += point.values[k] * seen.values[k];
            }
          }
        }
      }
    }
  }

  TORCHTP_HOST_DEVICE void add_spots(int thread, int32_t split, int32_t first_channel, const float* memory) const {
    const int32_t spot_floats = kTaps * lanes.block_channels();
    for (int32_t i = thread; i < spot_floats; i += kThreads) {
      const int32_t tap = i / lanes.block_channels(), q = i - tap * lanes.block_channels();
      if (first_channel + q >= points.channels) continue;
      float sum = 0;
      for (int32_t spot = 0; spot < lanes.spots(); ++spot) sum += memory[spot * spot_floats + i];
      partial[(int64_t{split} * points.channels + first_channel + q) * kTaps + (mirrored ? kTaps - 1 - tap : tap)] =
          sum;
    }
  }
};

}  // namespace torchtp::kernels
