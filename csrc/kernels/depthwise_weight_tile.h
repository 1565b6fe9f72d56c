#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_meeting.h"
#include "kernels/depthwise_stage.h"

namespace torchtp::kernels {

// sums[tap] = sum over points q of points[q] * window[kStride * q + dilation * tap - offset]; no dilation where there
// is a stride. At a stride of 1 the points are of (input, output's gradient) the one without halo; where that is the
// input, taps run in reverse order. At others they are the output's gradient, with its halo. A thread holds 8 / kStride
// x 4 points and all the sums of a channel's filter; each row of the window meets every row of points it belongs to.
template <typename T, int kKernel, int kStride, bool kChannelsLast>
struct DepthwiseWeightTile : NoTeams {
  static constexpr int kThreads = kChannelsLast ? 256 : 128;
  static constexpr int kBlocksPerSm = 512 / kThreads;
  static constexpr int64_t kEnoughBlocks = 262144 / kThreads;
  static constexpr int kStepPhases = 2, kPhases = 4;
  using Meeting = ForwardMeeting<kKernel, kStride>;
  static constexpr int kRows = 8 / kStride, kColumns = 4, kTaps = kKernel * kKernel;
  static constexpr int kWindow = Meeting::rows(kColumns);
  struct State {
    float sums[kTaps];
    float points[kRows][kColumns];
  };

  HaloPlanes<T> points;
  HaloPlanes<T> window;
  float* partial;  // [splits, C, kTaps]
  int64_t batches;
  int32_t offset_y, offset_x;
  int32_t splits;
  bool mirrored, loads_points;
  TileGrid grid;
  StageShape stage;
  Divider chunks;      // of channels, as a block has planes
  int32_t each, more;  // units of a split; so many of them have one more

  static DepthwiseWeightTile make(const HaloPlanes<T>& points, const HaloPlanes<T>& window, float* partial,
                                  int64_t batches, int32_t offset_y, int32_t offset_x, Steps steps, bool mirrored,
                                  size_t most_shared) {
    // Columns from a multiple of four on, so that loads are aligned.
    const int32_t first_column = -round_to_fours(points.columns_left);
    const Regions regions{{points.first_row(), points.end_row(), first_column, points.end_column()}, {}};
    DepthwiseWeightTile program{};
    program.points = points;
    program.window = window;
    program.partial = partial;
    program.batches = batches;
    program.offset_y = offset_y;
    program.offset_x = offset_x;
    program.mirrored = mirrored;
    program.loads_points = !kChannelsLast && steps.x == 1 && loads_four(points.own, points.width);
    program.grid = kChannelsLast ? tile_grid(8, 5, false, kRows, kColumns, 2, regions, steps)
                                 : tile_grid(7, 0, true, kRows, kColumns, 4, regions, steps);
    TileGrid& grid = program.grid;
    const int64_t innermost = kChannelsLast ? window.channels : window.width;
    do {
      const int32_t pitch = Meeting::skipped(grid.columns() - kColumns) + round_to_fours(kWindow);
      program.stage = stage_shape(grid.planes(), Meeting::rows(grid.rows()), Meeting::rows(grid.columns()), pitch,
                                  loads_four(window, innermost), steps);
    } while (program.shared_bytes() > most_shared && shrink(grid, !kChannelsLast));
    program.chunks = Divider((points.channels + grid.planes() - 1) >> grid.log_planes);
    const auto units = static_cast<int32_t>(batches) * grid.tiles();
    program.splits = splits_of(units, program.chunks.divisor);
    program.each = program.splits > 0 ? units / program.splits : 0;
    program.more = units - program.each * program.splits;
    return program;
  }

  // By the problem alone: some tiles for each block, and enough blocks for any device.
  static int32_t splits_of(int64_t units, int64_t chunks) {
    const int64_t most = (units + 3) / 4, enough = (kEnoughBlocks + chunks - 1) / chunks;
    return static_cast<int32_t>(most < enough ? most : enough);
  }
  int64_t num_blocks() const { return int64_t{chunks.divisor} * splits; }
  size_t shared_bytes() const {
    const int32_t tile = kChannelsLast ? stage.interleaved_floats() : stage.planar_floats();
    return sizeof(float) * (tile > kThreads * kTaps ? tile : kThreads * kTaps);
  }
  TORCHTP_HOST_DEVICE int num_steps(int64_t block) const {
    return each + (chunks.quotient(static_cast<int32_t>(block)) < more);
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    const auto block = static_cast<int32_t>(place.block), split = chunks.quotient(block);
    const int32_t first_channel = (block - split * chunks.divisor) << grid.log_planes;
    float* const memory = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      const int32_t unit = split * each + (split < more ? split : more) + step, n = grid.all.quotient(unit);
      bring(place.thread, n, first_channel, grid.tile(unit - n * grid.all.divisor), state, memory);
    } else if constexpr (kPhase == 1) {
      multiply(place.thread, state, memory);
    } else if constexpr (kPhase == 2) {
#pragma unroll
      for (int i = 0; i < kTaps; ++i) memory[place.thread * kTaps + i] = state.sums[i];
    } else {
      add_threads(place.thread, split, first_channel, memory);
    }
  }

 private:
  // A thread that is left over does what another one does; its sums are not taken.
  TORCHTP_HOST_DEVICE int32_t plane_of(int thread) const {
    return (kChannelsLast ? thread % kLanes : thread >> (grid.log_x + grid.log_y)) & (grid.planes() - 1);
  }
  TORCHTP_HOST_DEVICE int32_t column_of(int thread) const {
    return (kChannelsLast ? thread / kLanes : thread) & ((1 << grid.log_x) - 1);
  }
  TORCHTP_HOST_DEVICE int32_t row_of(int thread) const {
    return ((kChannelsLast ? thread / kLanes : thread) >> grid.log_x) & ((1 << grid.log_y) - 1);
  }

  TORCHTP_HOST_DEVICE void bring(int thread, int64_t n, int32_t first_channel, const Region& tile, State& state,
                                 float* memory) const {
    const int32_t window_y = Meeting::first_row(tile.y0, offset_y), window_x = Meeting::first_row(tile.x0, offset_x);
    if constexpr (kChannelsLast) {
      stage_interleaved<kThreads>(window, stage, n, first_channel, window_y, window_x, thread, memory);
    } else {
      const int64_t first_plane = n * points.channels + first_channel;
      stage_planar<kThreads>(window, stage, first_plane, (n + 1) * points.channels, window_y, window_x, thread, memory);
    }
    const int32_t c = first_channel + plane_of(thread);
    const Steps steps = kStride == 1 ? grid.steps : Steps{};
    const int32_t y0 = tile.y0 + row_of(thread) * kRows * steps.y, x = tile.x0 + column_of(thread) * kColumns * steps.x;
    const int64_t plane = kChannelsLast ? n : n * points.channels + c;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) state.points[r][j] = 0;
      if (c >= points.channels) continue;
      const int32_t y = y0 + r * steps.y;
      const bool own = y >= 0 && y < points.height;
      if (loads_points && own && x >= 0 && x + 4 <= points.width) {
        const T* const from = points.own + points.template own_index<kChannelsLast>(plane, c, y, x);
        const auto four = *reinterpret_cast<const Pack<T, 4>*>(from);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) state.points[r][j] = static_cast<float>(four.values[j]);
      } else {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) state.points[r][j] = point(plane, c, y, x + j * steps.x);
      }
    }
  }

  // Without a halo there is no need to look for pieces.
  TORCHTP_HOST_DEVICE float point(int64_t plane, int32_t c, int32_t y, int32_t x) const {
    if constexpr (kStride > 1) return points.template at<kChannelsLast>(plane, c, y, x);
    if (y >= points.height || x >= points.width) return 0;
    return static_cast<float>(points.own[points.template own_index<kChannelsLast>(plane, c, y, x)]);
  }

  TORCHTP_HOST_DEVICE void multiply(int thread, State& state, const float* memory) const {
    const int32_t q = plane_of(thread), ty = row_of(thread), tx = column_of(thread);
    const int32_t row_floats = kChannelsLast ? stage.columns * kLanes : stage.pitch;
    const int32_t first_row = Meeting::skipped(ty * kRows), first_column = Meeting::skipped(tx * kColumns);
    const float* from = kChannelsLast ? memory + (first_row * stage.columns + first_column) * kLanes + q
                                      : memory + (q * stage.rows + first_row) * stage.pitch + first_column;
#pragma unroll
    for (int v = 0; v < Meeting::rows(kRows); ++v, from += row_floats) {
      float row[kWindow];
      read_row<kWindow, kChannelsLast>(from, row);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int ky = Meeting::slot(r, v);
        if (ky < 0) continue;
#pragma unroll
        for (int kx = 0; kx < kKernel; ++kx) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            state.sums[ky * kKernel + kx] += state.points[r][j] * row[j * kStride + kx];
          }
        }
      }
    }
  }

  TORCHTP_HOST_DEVICE void add_threads(int thread, int32_t split, int32_t first_channel, const float* memory) const {
    const int32_t spots = 1 << (grid.log_x + grid.log_y);
    const int32_t spot_floats = kChannelsLast ? kLanes * kTaps : kTaps;
    const int32_t plane_floats = kChannelsLast ? kTaps : spots * kTaps;
    for (int32_t i = thread; i < grid.planes() * kTaps; i += kThreads) {
      const int32_t q = i / kTaps, tap = i - q * kTaps;
      if (first_channel + q >= points.channels) return;
      float sum = 0;
      for (int32_t spot = 0; spot < spots; ++spot) sum += memory[q * plane_floats + spot * spot_floats + tap];
      partial[(int64_t{split} * points.channels + first_channel + q) * kTaps + (mirrored ? kTaps - 1 - tap : tap)] =
          sum;
    }
  }
};

}  // namespace torchtp::kernels
