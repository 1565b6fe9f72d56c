#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_stage.h"
#include "kernels/depthwise_walk.h"

namespace torchtp::kernels {

// depthwise_weight_tile.h for any kernel, stride and dilation: too many sums for a thread, so that it takes four taps
// of one filter row, over every num_slices-th row of a tile of points that lies in shared memory too. Four points meet
// their window of eight. At a stride of s in x the window lies in s strands, and the four taps are s apart. A block
// takes as many filter rows as it has threads for.
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
  DepthwiseWalk y_walk, x_walk;
  int32_t groups;     // of four taps in a strand of a filter row
  int32_t tall;       // filter rows of a block
  int32_t row_parts;  // blocks that share the filter's rows
  int32_t splits;
  bool mirrored;
  TileGrid grid;
  StageShape points_stage, window_stage;

  // Points: rows and columns of outputs of the convolution `params`, with their halo if they have one.
  static DepthwiseWeightWide make(const HaloPlanes<T>& points, const HaloPlanes<T>& window, float* partial,
                                  const DepthwiseParams& params, bool mirrored, size_t most_shared) {
    const auto y = DepthwiseWalk::make(params.y, false), x = DepthwiseWalk::make(params.x, false);
    const Steps steps{y.step(), x.step()};
    DepthwiseWeightWide program{};
    // Columns from a multiple of four on, so that loads are aligned.
    const int32_t first_column = -round_to_fours(points.columns_left);
    const Regions regions{{points.first_row(), points.end_row(), first_column, points.end_column()}, {}};
    program.grid = {0, 0, 0, kTileRows, kTileColumns, regions, steps};
    program.grid.count();
    program.points = points;
    program.window = window;
    program.partial = partial;
    program.batches = params.batches;
    program.y_walk = y;
    program.x_walk = x;
    program.groups = (x.kernel + 4 * x.skip() - 1) / (4 * x.skip());
    const int32_t most_tall = kThreads / (x.skip() * program.groups);
    program.row_parts = (y.kernel + most_tall - 1) / most_tall;
    program.tall = (y.kernel + program.row_parts - 1) / program.row_parts;
    program.mirrored = mirrored;
    const bool loads_points = loads_four(points, points.width), loads_window = loads_four(window, window.width);
    const int32_t rows = (kTileRows - 1) * y.skip() + program.tall;
    // The last four taps may overhang the filter; what they read there is not used, but must be a number.
    const int32_t strand = kTileColumns + 4 * program.groups;
    int32_t planes = kPlanes;
    do {
      program.points_stage = stage_shape(planes, kTileRows, kTileColumns, kTileColumns, loads_points, steps);
      program.window_stage = stranded_shape(planes, rows, strand * x.skip(), x.skip(), strand + 4, loads_window,
                                            {y.in_step(), x.in_step()});
    } while (program.shared_bytes() > most_shared && (planes /= 2) > 0);
    program.splits = splits_of(program.units(), program.blocks_a_split());
    return program;
  }

  static int32_t splits_of(int64_t units, int64_t blocks) {
    const int64_t most = (units + 3) / 4, enough = (kEnoughBlocks + blocks - 1) / blocks;
    return static_cast<int32_t>(most < enough ? most : enough);
  }

  TORCHTP_HOST_DEVICE int32_t taps() const { return y_walk.kernel * x_walk.kernel; }
  TORCHTP_HOST_DEVICE int32_t workers() const { return tall * x_walk.stride * groups; }
  TORCHTP_HOST_DEVICE int32_t slices() const { return kThreads / workers(); }
  TORCHTP_HOST_DEVICE int64_t units() const { return batches * grid.tiles(); }
  TORCHTP_HOST_DEVICE int32_t planes() const { return points_stage.planes; }
  TORCHTP_HOST_DEVICE int32_t chunks() const { return (points.channels + planes() - 1) / planes(); }
  TORCHTP_HOST_DEVICE int32_t blocks_a_split() const { return chunks() * row_parts; }
  int64_t num_blocks() const { return int64_t{blocks_a_split()} * splits; }
  size_t shared_bytes() const {
    const int32_t tile = points_stage.planar_floats() + window_stage.planar_floats(), sums = kThreads * kPlanes * 4;
    return sizeof(float) * (tile > sums ? tile : sums);
  }
  TORCHTP_HOST_DEVICE int64_t first_unit(int32_t split) const { return units() * split / splits; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t block) const {
    const auto split = static_cast<int32_t>(block / blocks_a_split());
    return static_cast<int>(first_unit(split + 1) - first_unit(split));
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    const auto split = static_cast<int32_t>(place.block / blocks_a_split());
    const auto of_split = static_cast<int32_t>(place.block % blocks_a_split());
    const int32_t first_channel = of_split / row_parts * planes(), first_row = of_split % row_parts * tall;
    float* const memory = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      const int64_t unit = first_unit(split) + step, n = unit / grid.tiles();
      const Region tile = grid.tile(static_cast<int32_t>(unit - n * grid.tiles()));
      bring<false>(points, points_stage, n, first_channel, tile.y0, tile.x0, place.thread, memory);
      const int32_t y = y_walk.run(tile.y0).line + first_row * y_walk.in_step(), x = x_walk.run(tile.x0).line;
      float* const windows = memory + points_stage.planar_floats();
      if (window_stage.strands.count == 1) {
        bring<false>(window, window_stage, n, first_channel, y, x, place.thread, windows);
      } else {
        bring<true>(window, window_stage, n, first_channel, y, x, place.thread, windows);
      }
    } else if constexpr (kPhase == 1) {
      multiply(place.thread, state, memory);
    } else if constexpr (kPhase == 2) {
#pragma unroll
      for (int q = 0; q < kPlanes; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) memory[(q * 4 + i) * kThreads + place.thread] = state.sums[q][i];
      }
    } else {
      add_slices(place.thread, split, first_channel, first_row, memory);
    }
  }

 private:
  template <bool kInStrands>
  TORCHTP_HOST_DEVICE void bring(const HaloPlanes<T>& from, const StageShape& stage, int64_t n, int32_t first_channel,
                                 int32_t y, int32_t x, int thread, float* memory) const {
    if constexpr (kChannelsLast) {
      stage_planar_from_last<kThreads, kInStrands>(from, stage, n, first_channel, y, x, thread, memory);
    } else {
      const int64_t plane = n * points.channels + first_channel;
      stage_planar<kThreads, kInStrands>(from, stage, plane, plane + 1, y, x, thread, memory);
    }
  }

  // A worker takes filter row `ky` of the block, and of its columns four from strand + 4 * strands * group on, that
  // many apart.
  TORCHTP_HOST_DEVICE int32_t worker_of(int32_t ky, int32_t strand, int32_t group) const {
    return (ky * x_walk.stride + strand) * groups + group;
  }

  TORCHTP_HOST_DEVICE void multiply(int thread, State& state, const float* memory) const {
    const int32_t slice = thread / workers(), worker = thread - slice * workers();
    if (slice >= slices()) return;
    const int32_t group = worker % groups, strand = worker / groups % x_walk.stride;
    const int32_t ky = worker / groups / x_walk.stride;
    const float* const windows = memory + points_stage.planar_floats() + strand * window_stage.strands.pitch;
    using Four = Pack<float, 4>;
#pragma unroll
    for (int q = 0; q < kPlanes; ++q) {
      if (q >= planes()) break;
      for (int32_t r = slice; r < kTileRows; r += slices()) {
        const float* const point = memory + (q * kTileRows + r) * points_stage.pitch;
        const float* const row =
            windows + (q * window_stage.rows + r * y_walk.stride + ky) * window_stage.pitch + group * 4;
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

  TORCHTP_HOST_DEVICE void add_slices(int thread, int32_t split, int32_t first_channel, int32_t first_row,
                                      const float* memory) const {
    const int32_t here = tall < y_walk.kernel - first_row ? tall : y_walk.kernel - first_row;
    const int32_t of_block = here * x_walk.kernel;
    for (int32_t index = thread; index < planes() * of_block; index += kThreads) {
      const int32_t q = index / of_block, rest = index - q * of_block;
      if (first_channel + q >= points.channels) return;
      const int32_t ky = rest / x_walk.kernel, kx = rest - ky * x_walk.kernel, tap = first_row * x_walk.kernel + rest;
      const int32_t along = kx / x_walk.stride, strand = kx - along * x_walk.stride;
      const float* const from = memory + (q * 4 + along % 4) * kThreads + worker_of(ky, strand, along / 4);
      float sum = 0;
      for (int32_t slice = 0; slice < slices(); ++slice) sum += from[slice * workers()];
      partial[(int64_t{split} * points.channels + first_channel + q) * taps() + (mirrored ? taps() - 1 - tap : tap)] =
          sum;
    }
  }
};

}  // namespace torchtp::kernels
