#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_stage.h"
#include "kernels/depthwise_walk.h"

namespace torchtp::kernels {

// Any kernel, stride and dilation, a convolution or the gradient of its input: filters too large for registers, or not
// known to the compiler, are read from shared memory, four taps at a time for the 4 x 8 outputs of a thread. At a
// stride of s in x the window and the filter lie in s strands, and each is a convolution with a stride of 1.
template <typename T, bool kChannelsLast>
struct DepthwiseWide : NoTeams {
  static constexpr int kThreads = 256, kBlocksPerSm = 2;
  static constexpr int kStepPhases = 2, kPhases = 2;
  static constexpr int kRows = 4, kColumns = 8;
  static constexpr size_t kGoodShared = 160 * 1024;
  struct State {
    int32_t taps_y, taps_x;  // of this tile
  };

  HaloPlanes<T> in;
  const T* weight;
  const T* bias;
  T* out;
  int64_t batches;
  int32_t out_height, out_width;
  DepthwiseWalk y_walk, x_walk;
  int32_t filter_rows, filter_strand;  // in shared memory; floats of one strand of a row
  TileGrid grid;
  StageShape stage;

  // input_grad: `in` is the gradient of the output, `out` that of the input.
  static DepthwiseWide make(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                            const DepthwiseParams& params, const Regions& regions, bool input_grad,
                            size_t most_shared) {
    const auto y = DepthwiseWalk::make(params.y, input_grad), x = DepthwiseWalk::make(params.x, input_grad);
    const int32_t strand_taps = (x.most_taps() + x.skip() - 1) / x.skip();
    DepthwiseWide program{{},
                          in,
                          weight,
                          bias,
                          out,
                          params.batches,
                          input_grad ? params.in_height : params.out_height,
                          input_grad ? params.in_width : params.out_width,
                          y,
                          x,
                          y.most_taps(),
                          round_to_fours(strand_taps),
                          {},
                          {}};
    const Steps steps{y.step(), x.step()};
    program.grid = tile_grid(8, kChannelsLast ? 3 : 0, !kChannelsLast, kRows, kColumns, 3, regions, steps);
    const size_t most = most_shared < kGoodShared ? most_shared : kGoodShared;
    for (;;) {
      TileGrid& grid = program.grid;
      const int32_t strand = round_to_fours(grid.columns() + strand_taps - 1) + 4;
      program.stage = stranded_shape(grid.planes(), (grid.rows() - 1) * y.skip() + y.most_taps(),
                                     (grid.columns() - 1) * x.skip() + x.most_taps(), x.skip(), strand,
                                     loads_four(in, in.width), {y.in_step(), x.in_step()});
      if (program.shared_bytes() <= most || !shrink(grid, true)) return program;
    }
  }

  TORCHTP_HOST_DEVICE int32_t filter_floats() const { return filter_rows * stage.strands.count * filter_strand; }
  TORCHTP_HOST_DEVICE int32_t chunks() const { return (in.channels + grid.planes() - 1) >> grid.log_planes; }
  TORCHTP_HOST_DEVICE int64_t num_planes() const { return batches * in.channels; }
  int64_t num_blocks() const {
    const int64_t groups = kChannelsLast ? batches * chunks() : (num_planes() + grid.planes() - 1) >> grid.log_planes;
    return groups * grid.tiles();
  }
  size_t shared_bytes() const {
    return sizeof(float) * (stage.planar_floats() + size_t(grid.planes()) * filter_floats());
  }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void* shared) const {
    const auto block = static_cast<int32_t>(place.block), group = grid.all.quotient(block);
    const Region tile = grid.tile(block - group * grid.all.divisor);
    float* const memory = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      bring(place.thread, group, tile, state, memory);
    } else {
      convolve(place.thread, group, tile, state, memory);
    }
  }

 private:
  TORCHTP_HOST_DEVICE int32_t first_channel(uint32_t group) const {
    return static_cast<int32_t>(group % static_cast<uint32_t>(chunks())) << grid.log_planes;
  }
  TORCHTP_HOST_DEVICE int64_t batch(uint32_t group) const { return group / static_cast<uint32_t>(chunks()); }

  TORCHTP_HOST_DEVICE void bring(int thread, uint32_t group, const Region& tile, State& state, float* memory) const {
    const TapRun y = y_walk.run(tile.y0), x = x_walk.run(tile.x0);
    state = {y.taps, x.taps};
    const int32_t taps = y.taps * x.taps;
    if (taps == 0) return;
    const int64_t first_plane = int64_t{group} << grid.log_planes;
    float* const filters = memory + stage.planar_floats();
    const Strands filter{stage.strands.count, filter_strand, stage.strands.over_count};
    for (int32_t i = thread; i < grid.planes() * taps; i += kThreads) {
      const int32_t q = i / taps, tap = i - q * taps, ky = tap / x.taps, kx = tap - ky * x.taps;
      const int64_t plane = kChannelsLast ? first_channel(group) + q : first_plane + q;
      const bool there = plane < (kChannelsLast ? int64_t{in.channels} : num_planes());
      const int64_t row = plane % in.channels * y_walk.kernel + y.first + y.step * ky;
      filters[q * filter_floats() + ky * filter.count * filter.pitch + filter.place(kx)] =
          there ? static_cast<float>(weight[row * x_walk.kernel + x.first + x.step * kx]) : 0;
    }
    if (stage.strands.count == 1) {
      bring_window<false>(thread, group, first_plane, y.line, x.line, memory);
    } else {
      bring_window<true>(thread, group, first_plane, y.line, x.line, memory);
    }
  }

  template <bool kInStrands>
  TORCHTP_HOST_DEVICE void bring_window(int thread, uint32_t group, int64_t first_plane, int32_t y, int32_t x,
                                        float* memory) const {
    if constexpr (kChannelsLast) {
      stage_planar_from_last<kThreads, kInStrands>(in, stage, batch(group), first_channel(group), y, x, thread, memory);
    } else {
      stage_planar<kThreads, kInStrands>(in, stage, first_plane, num_planes(), y, x, thread, memory);
    }
  }

  TORCHTP_HOST_DEVICE void convolve(int thread, uint32_t group, const Region& tile, const State& state,
                                    const float* memory) const {
    const int32_t tx = thread & ((1 << grid.log_x) - 1), ty = (thread >> grid.log_x) & ((1 << grid.log_y) - 1);
    const int32_t q = thread >> (grid.log_x + grid.log_y);
    const int32_t y = tile.y0 + ty * kRows * grid.steps.y, x = tile.x0 + tx * kColumns * grid.steps.x;
    const int64_t plane = kChannelsLast ? batch(group) : (int64_t{group} << grid.log_planes) + q;
    const int32_t c = kChannelsLast ? first_channel(group) + q : static_cast<int32_t>(plane % in.channels);
    if (q >= grid.planes() || y >= tile.y1 || x >= tile.x1) return;
    if (kChannelsLast ? c >= in.channels : plane >= num_planes()) return;

    const float start = bias ? static_cast<float>(bias[c]) : 0.0f;
    float sums[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[r][j] = start;
    }
    const Strands& strands = stage.strands;
    const int32_t row_pitch = y_walk.skip() * stage.pitch, filter_row = strands.count * filter_strand;
    for (int32_t strand = 0; strand < strands.count; ++strand) {
      const int32_t taps_x = strands.along(state.taps_x - strand + strands.count - 1);
      const float* filter = memory + stage.planar_floats() + q * filter_floats() + strand * filter_strand;
      const float* from =
          memory + q * stage.rows * stage.pitch + ty * kRows * row_pitch + strand * strands.pitch + tx * kColumns;
      for (int32_t ky = 0; ky < state.taps_y; ++ky, from += stage.pitch, filter += filter_row) {
        add_row(from, row_pitch, filter, taps_x, sums);
      }
    }

    const int64_t pixel = (plane * out_height + y) * out_width + x;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int32_t down = r * grid.steps.y, right = j * grid.steps.x;
        if (y + down >= tile.y1 || x + right >= tile.x1) continue;
        const int64_t at = pixel + int64_t{down} * out_width + right;
        out[kChannelsLast ? at * in.channels + c : at] = static_cast<T>(sums[r][j]);
      }
    }
  }

  // The taps of one filter row that lie in a strand, for the outputs of a thread.
  static TORCHTP_HOST_DEVICE void add_row(const float* from, int32_t row_pitch, const float* filter, int32_t taps,
                                          float (&sums)[kRows][kColumns]) {
    float window[kRows][kColumns + 4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) read_part<0, kColumns>(from + r * row_pitch, window[r]);
    int32_t kx = 0;
#pragma unroll 3
    for (; kx + 4 <= taps; kx += 4) {
      take<4>(from + kx, row_pitch, filter + kx, 4, window, sums);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) window[r][i] = window[r][i + 4];
      }
    }
    if (kx < taps) take<3>(from + kx, row_pitch, filter + kx, taps - kx, window, sums);
  }

  template <int kFirst, int kEnd>
  static TORCHTP_HOST_DEVICE void read_part(const float* from, float (&row)[kColumns + 4]) {
#pragma unroll
    for (int i = kFirst; i < kEnd; i += 4) {
      const auto four = *reinterpret_cast<const Pack<float, 4>*>(from + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) row[i + j] = four.values[j];
    }
  }

  // Up to kMost taps of one filter row; what lies behind the last one may be anything and is not touched.
  template <int kMost>
  static TORCHTP_HOST_DEVICE void take(const float* from, int32_t row_pitch, const float* filter, int32_t count,
                                       float (&window)[kRows][kColumns + 4], float (&sums)[kRows][kColumns]) {
    const auto taps = *reinterpret_cast<const Pack<float, 4>*>(filter);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      read_part<kColumns, kColumns + 4>(from + r * row_pitch, window[r]);
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i >= count) break;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[r][j] += window[r][i + j] * taps.values[i];
      }
    }
  }
};

}  // namespace torchtp::kernels
