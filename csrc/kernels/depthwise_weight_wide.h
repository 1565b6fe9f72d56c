#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_stage.h"

namespace torchtp::kernels {

// depthwise_weight_tile.h for any kernel: too many sums for a thread, so that it takes four taps of one filter row,
// over every num_slices-th row of a tile of points that lies in shared memory too. Four points meet their window of
// eight.
template <typename T, bool kChannelsLast>
struct DepthwiseWeightWide : NoTeams {
  static constexpr int kThreads = 256, kBlocksPerSm = 2;
  static constexpr int64_t kEnoughBlocks = 1024;
  static constexpr int kStepPhases = 2, kPhases = 4;
  static constexpr int kPlanes = kChannelsLast ? 8 : 1;  // channels last: neighbours in memory are brought together
  static constexpr int32_t kTileRows = 16, kTileColumns = 32;
  struct State {
    float sums[kPlanes][4];
  };

  HaloPlanes<T> points;
  HaloPlanes<T> window;
  float* partial;  // [splits, C, taps]
  int64_t batches;
  int32_t kernel_y, kernel_x, offset_y, offset_x;
  int32_t splits;
  bool mirrored;
  TileGrid grid;
  StageShape points_stage, window_stage;

  static DepthwiseWeightWide make(const HaloPlanes<T>& points, const HaloPlanes<T>& window, float* partial,
                                  const DepthwiseParams& params, int32_t offset_y, int32_t offset_x, bool mirrored) {
    const Steps steps{params.y.dilation, params.x.dilation};
    DepthwiseWeightWide program{};
    program.grid = {0, 0, 0, kTileRows, kTileColumns, {{0, points.height, 0, points.width}, {}}, steps};
    program.points = points;
    program.window = window;
    program.partial = partial;
    program.batches = params.batches;
    program.kernel_y = params.y.kernel;
    program.kernel_x = params.x.kernel;
    program.offset_y = offset_y;
    program.offset_x = offset_x;
    program.mirrored = mirrored;
    program.points_stage =
        stage_shape(kPlanes, kTileRows, kTileColumns, kTileColumns, loads_four(points.own, points.width), steps);
    // The last four taps may overhang the filter; what they read there is not used, but must be a number.
    const int32_t columns = kTileColumns + round_to_fours(params.x.kernel);
    program.window_stage = stage_shape(kPlanes, kTileRows + params.y.kernel - 1, columns, columns + 4,
                                       loads_four(window.own, window.width), steps);
    program.splits = splits_of(program.units(), program.chunks());
    return program;
  }

  static int32_t splits_of(int64_t units, int64_t chunks) {
    const int64_t most = (units + 3) / 4, enough = (kEnoughBlocks + chunks - 1) / chunks;
    return static_cast<int32_t>(most < enough ? most : enough);
  }
  // Whether a block has a thread for every four taps, and memory for the window.
  bool fits(size_t most_shared) const { return workers() <= kThreads && shared_bytes() <= most_shared; }

  static TORCHTP_HOST_DEVICE int32_t groups_of(int32_t kernel) { return (kernel + 3) / 4; }
  TORCHTP_HOST_DEVICE int32_t taps() const { return kernel_y * kernel_x; }
  TORCHTP_HOST_DEVICE int32_t workers() const { return kernel_y * groups_of(kernel_x); }
  TORCHTP_HOST_DEVICE int32_t slices() const { return kThreads / workers(); }
  TORCHTP_HOST_DEVICE int64_t units() const { return batches * grid.tiles(); }
  TORCHTP_HOST_DEVICE int32_t chunks() const { return (points.channels + kPlanes - 1) / kPlanes; }
  int64_t num_blocks() const { return int64_t{chunks()} * splits; }
  size_t shared_bytes() const {
    const int32_t tile = points_stage.planar_floats() + window_stage.planar_floats(), sums = kThreads * kPlanes * 4;
    return sizeof(float) * (tile > sums ? tile : sums);
  }
  TORCHTP_HOST_DEVICE int64_t first_unit(int32_t split) const { return units() * split / splits; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t block) const {
    const auto split = static_cast<int32_t>(block / chunks());
    return static_cast<int>(first_unit(split + 1) - first_unit(split));
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    const auto split = static_cast<int32_t>(place.block / chunks());
    const int32_t first_channel = static_cast<int32_t>(place.block % chunks()) * kPlanes;
    float* const memory = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      const int64_t unit = first_unit(split) + step, n = unit / grid.tiles();
      const Region tile = grid.tile(static_cast<int32_t>(unit - n * grid.tiles()));
      bring(points, points_stage, n, first_channel, tile.y0, tile.x0, place.thread, memory);
      bring(window, window_stage, n, first_channel, tile.y0 - offset_y, tile.x0 - offset_x, place.thread,
            memory + points_stage.planar_floats());
    } else if constexpr (kPhase == 1) {
      multiply(place.thread, state, memory);
    } else if constexpr (kPhase == 2) {
#pragma unroll
      for (int q = 0; q < kPlanes; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) memory[(q * 4 + i) * kThreads + place.thread] = state.sums[q][i];
      }
    } else {
      add_slices(place.thread, split, first_channel, memory);
    }
  }

 private:
  TORCHTP_HOST_DEVICE void bring(const HaloPlanes<T>& from, const StageShape& stage, int64_t n, int32_t first_channel,
                                 int32_t y, int32_t x, int thread, float* memory) const {
    if constexpr (kChannelsLast) {
      stage_planar_from_last<kThreads>(from, stage, n, first_channel, y, x, thread, memory);
    } else {
      const int64_t plane = n * points.channels + first_channel;
      stage_planar<kThreads>(from, stage, plane, plane + 1, y, x, thread, memory);
    }
  }

  TORCHTP_HOST_DEVICE void multiply(int thread, State& state, const float* memory) const {
    const int32_t slice = thread / workers(), worker = thread - slice * workers();
    if (slice >= slices()) return;
    const int32_t ky = worker / groups_of(kernel_x), kx = (worker - ky * groups_of(kernel_x)) * 4;
    const float* const windows = memory + points_stage.planar_floats();
    using Four = Pack<float, 4>;
#pragma unroll
    for (int q = 0; q < kPlanes; ++q) {
      for (int32_t r = slice; r < kTileRows; r += slices()) {
        const float* const point = memory + (q * kTileRows + r) * points_stage.pitch;
        const float* const row = windows + (q * window_stage.rows + r + ky) * window_stage.pitch + kx;
        Four low = *reinterpret_cast<const Four*>(row);
#pragma unroll
        for (int32_t x = 0; x < kTileColumns; x += 4) {
          const Four four = *reinterpret_cast<const Four*>(point + x);
          const Four high = *reinterpret_cast<const Four*>(row + x + 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              state.sums[q][i] += four.values[j] * (i + j < 4 ? low.values[i + j] : high.values[i + j - 4]);
            }
          }
          low = high;
        }
      }
    }
  }

  TORCHTP_HOST_DEVICE void add_slices(int thread, int32_t split, int32_t first_channel, const float* memory) const {
    for (int32_t index = thread; index < kPlanes * taps(); index += kThreads) {
      const int32_t q = index / taps(), tap = index - q * taps();
      if (first_channel + q >= points.channels) return;
      const int32_t ky = tap / kernel_x, kx = tap - ky * kernel_x;
      const float* const from = memory + (q * 4 + kx % 4) * kThreads + ky * groups_of(kernel_x) + kx / 4;
      float sum = 0;
      for (int32_t slice = 0; slice < slices(); ++slice) sum += from[slice * workers()];
      partial[(int64_t{split} * points.channels + first_channel + q) * taps() + (mirrored ? taps() - 1 - tap : tap)] =
          sum;
    }
  }
};

}  // namespace torchtp::kernels
