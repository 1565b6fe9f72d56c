#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_stage.h"

namespace torchtp::kernels {

// Stride and dilation 1: sums[tap] = sum over own points q of points[q] * window[q + tap - offset]. Of (input, output's
// gradient) the one without halo is `points`; where that is the input, taps run in reverse order. A thread holds 8 x 4
// points and all the sums of a channel's filter; each row of the window meets every row of points it belongs to.
template <typename T, int kKernel, bool kChannelsLast>
struct DepthwiseWeightTile : NoTeams {
  static constexpr int kThreads = kChannelsLast ? 256 : 128;
  static constexpr int kBlocksPerSm = 512 / kThreads;
  static constexpr int64_t kEnoughBlocks = 262144 / kThreads;
  static constexpr int kStepPhases = 2, kPhases = 4;
  static constexpr int kRows = 8, kColumns = 4, kTaps = kKernel * kKernel;
  static constexpr int kWindow = kColumns - 1 + kKernel;
  struct State {
    float sums[kTaps];
    float points[kRows][kColumns];
  };

  HaloPlanes<T> window;
  const T* points;
  float* partial;  // [splits, C, kTaps]
  int64_t batches;
  int32_t channels, height, width, offset_y, offset_x;
  int32_t splits;
  bool mirrored, loads_points;
  TileGrid grid;
  StageShape stage;

  static DepthwiseWeightTile make(const HaloPlanes<T>& points, const HaloPlanes<T>& window, float* partial,
                                  int64_t batches, int32_t offset_y, int32_t offset_x, bool mirrored,
                                  size_t most_shared) {
    const Regions regions{{0, points.height, 0, points.width}, {}};
    DepthwiseWeightTile program{};
    program.window = window;
    program.points = points.own;
    program.partial = partial;
    program.batches = batches;
    program.channels = points.channels;
    program.height = points.height;
    program.width = points.width;
    program.offset_y = offset_y;
    program.offset_x = offset_x;
    program.mirrored = mirrored;
    program.loads_points = !kChannelsLast && loads_four(points.own, points.width);
    program.grid = kChannelsLast ? tile_grid(8, 5, false, kRows, kColumns, 2, regions)
                                 : tile_grid(7, 0, true, kRows, kColumns, 4, regions);
    TileGrid& grid = program.grid;
    const int64_t innermost = kChannelsLast ? window.channels : window.width;
    do {
      program.stage =
          stage_shape(grid.planes(), grid.rows() + kKernel - 1, grid.columns() + kKernel - 1,
                      grid.columns() - kColumns + round_to_fours(kWindow), loads_four(window.own, innermost));
    } while (program.shared_bytes() > most_shared && shrink(grid, !kChannelsLast));
    program.splits = splits_of(program.units(), program.chunks());
    return program;
  }

  // By the problem alone: some tiles for each block, and enough blocks for any device.
  static int32_t splits_of(int64_t units, int64_t chunks) {
    const int64_t most = (units + 3) / 4, enough = (kEnoughBlocks + chunks - 1) / chunks;
    return static_cast<int32_t>(most < enough ? most : enough);
  }
  TORCHTP_HOST_DEVICE int64_t units() const { return batches * grid.tiles(); }
  TORCHTP_HOST_DEVICE int32_t chunks() const { return (channels + grid.planes() - 1) >> grid.log_planes; }
  int64_t num_blocks() const { return int64_t{chunks()} * splits; }
  size_t shared_bytes() const {
    const int32_t tile = kChannelsLast ? stage.interleaved_floats() : stage.planar_floats();
    return sizeof(float) * (tile > kThreads * kTaps ? tile : kThreads * kTaps);
  }
  TORCHTP_HOST_DEVICE int64_t first_unit(int32_t split) const { return units() * split / splits; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t block) const {
    const auto split = static_cast<int32_t>(block / chunks());
    return static_cast<int>(first_unit(split + 1) - first_unit(split));
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    const auto split = static_cast<int32_t>(place.block / chunks());
    const int32_t first_channel = static_cast<int32_t>(place.block % chunks()) << grid.log_planes;
    float* const memory = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      const int64_t unit = first_unit(split) + step;
      const Region tile = grid.tile(static_cast<int32_t>(unit % grid.tiles()));
      bring(place.thread, unit / grid.tiles(), first_channel, tile, state, memory);
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
    if constexpr (kChannelsLast) {
      stage_interleaved<kThreads>(window, stage, n, first_channel, tile.y0 - offset_y, tile.x0 - offset_x, thread,
                                  memory);
    } else {
      stage_planar<kThreads>(window, stage, n * channels + first_channel, (n + 1) * channels, tile.y0 - offset_y,
                             tile.x0 - offset_x, thread, memory);
    }
    const int32_t c = first_channel + plane_of(thread);
    const int32_t y = tile.y0 + row_of(thread) * kRows, x = tile.x0 + column_of(thread) * kColumns;
    const int64_t plane = kChannelsLast ? n : n * channels + c;
    const int64_t pixel = (plane * height + y) * width + x;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) state.points[r][j] = 0;
      if (c >= channels || y + r >= height) continue;
      const int64_t first = pixel + int64_t{r} * width;
      if (loads_points && x + 4 <= width) {
        const auto four = *reinterpret_cast<const Pack<T, 4>*>(points + first);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) state.points[r][j] = static_cast<float>(four.values[j]);
      } else {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          if (x + j < width) {
            state.points[r][j] = static_cast<float>(points[kChannelsLast ? (first + j) * channels + c : first + j]);
          }
        }
      }
    }
  }

  TORCHTP_HOST_DEVICE void multiply(int thread, State& state, const float* memory) const {
    const int32_t q = plane_of(thread), ty = row_of(thread), tx = column_of(thread);
    const int32_t row_floats = kChannelsLast ? stage.columns * kLanes : stage.pitch;
    const float* from = kChannelsLast ? memory + (ty * kRows * stage.columns + tx * kColumns) * kLanes + q
                                      : memory + (q * stage.rows + ty * kRows) * stage.pitch + tx * kColumns;
#pragma unroll
    for (int v = 0; v < kRows + kKernel - 1; ++v, from += row_floats) {
      float row[kWindow];
      read_row<kWindow, kChannelsLast>(from, row);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int ky = v - r;
        if (ky < 0 || ky >= kKernel) continue;
#pragma unroll
        for (int kx = 0; kx < kKernel; ++kx) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) state.sums[ky * kKernel + kx] += state.points[r][j] * row[j + kx];
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
      if (first_channel + q >= channels) return;
      float sum = 0;
      for (int32_t spot = 0; spot < spots; ++spot) sum += memory[q * plane_floats + spot * spot_floats + tap];
      partial[(int64_t{split} * channels + first_channel + q) * kTaps + (mirrored ? kTaps - 1 - tap : tap)] = sum;
    }
  }
};

}  // namespace torchtp::kernels
