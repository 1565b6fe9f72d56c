#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_stage.h"

namespace torchtp::kernels {

// Stride 1, any kernel and dilation: filters too large for registers are read from shared memory, four taps at a time
// for the 4 x 8 outputs of a thread.
template <typename T, bool kChannelsLast>
struct DepthwiseWide : NoTeams {
  static constexpr int kThreads = 256, kBlocksPerSm = 2;
  static constexpr int kStepPhases = 2, kPhases = 2;
  static constexpr int kRows = 4, kColumns = 8;
  static constexpr size_t kGoodShared = 160 * 1024;
  using State = NoState;

  HaloPlanes<T> in;
  const T* weight;
  const T* bias;
  T* out;
  DepthwiseParams params;
  bool mirrored;
  TileGrid grid;
  StageShape stage;

  static DepthwiseWide make(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                            const DepthwiseParams& params, const Regions& regions, bool mirrored, size_t most_shared) {
    DepthwiseWide program{{}, in, weight, bias, out, params, mirrored, {}, {}};
    const Steps steps{params.y.dilation, params.x.dilation};
    program.grid = tile_grid(8, kChannelsLast ? 3 : 0, !kChannelsLast, kRows, kColumns, 3, regions, steps);
    const size_t most = most_shared < kGoodShared ? most_shared : kGoodShared;
    for (;;) {
      TileGrid& grid = program.grid;
      const int32_t columns = grid.columns() + params.x.kernel - 1;
      program.stage = stage_shape(grid.planes(), grid.rows() + params.y.kernel - 1, columns,
                                  round_to_fours(columns) + 4, loads_four(in.own, params.in_width), steps);
      if (program.shared_bytes() <= most || !shrink(grid, true)) return program;
    }
  }

  TORCHTP_HOST_DEVICE int32_t filter_row() const { return round_to_fours(params.x.kernel); }
  TORCHTP_HOST_DEVICE int32_t filter_floats() const { return params.y.kernel * filter_row(); }
  TORCHTP_HOST_DEVICE int32_t chunks() const { return (params.channels + grid.planes() - 1) >> grid.log_planes; }
  TORCHTP_HOST_DEVICE int64_t num_planes() const { return params.batches * params.channels; }
  int64_t num_blocks() const {
    const int64_t groups =
        kChannelsLast ? params.batches * chunks() : (num_planes() + grid.planes() - 1) >> grid.log_planes;
    return groups * grid.tiles();
  }
  size_t shared_bytes() const {
    return sizeof(float) * (stage.planar_floats() + size_t(grid.planes()) * filter_floats());
  }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State&, void* shared) const {
    const auto block = static_cast<uint32_t>(place.block), tiles = static_cast<uint32_t>(grid.tiles());
    const Region tile = grid.tile(static_cast<int32_t>(block % tiles));
    float* const memory = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      bring(place.thread, block / tiles, tile, memory);
    } else {
      convolve(place.thread, block / tiles, tile, memory);
    }
  }

 private:
  TORCHTP_HOST_DEVICE int32_t first_channel(uint32_t group) const {
    return static_cast<int32_t>(group % static_cast<uint32_t>(chunks())) << grid.log_planes;
  }
  TORCHTP_HOST_DEVICE int64_t batch(uint32_t group) const { return group / static_cast<uint32_t>(chunks()); }

  TORCHTP_HOST_DEVICE void bring(int thread, uint32_t group, const Region& tile, float* memory) const {
    const int32_t y0 = tile.y0 - params.y.offset, x0 = tile.x0 - params.x.offset;
    const int64_t first_plane = int64_t{group} << grid.log_planes;
    float* const filters = memory + stage.planar_floats();
    const int32_t taps = params.y.kernel * params.x.kernel;
    for (int32_t i = thread; i < grid.planes() * taps; i += kThreads) {
      const int32_t q = i / taps, tap = i - q * taps, ky = tap / params.x.kernel, kx = tap - ky * params.x.kernel;
      const int64_t plane = kChannelsLast ? first_channel(group) + q : first_plane + q;
      const bool there = plane < (kChannelsLast ? int64_t{params.channels} : num_planes());
      const int64_t from = plane % params.channels * taps + (mirrored ? taps - 1 - tap : tap);
      filters[q * filter_floats() + ky * filter_row() + kx] = there ? static_cast<float>(weight[from]) : 0;
    }
    if constexpr (kChannelsLast) {
      stage_planar_from_last<kThreads>(in, stage, batch(group), first_channel(group), y0, x0, thread, memory);
    } else {
      stage_planar<kThreads>(in, stage, first_plane, num_planes(), y0, x0, thread, memory);
    }
  }

  TORCHTP_HOST_DEVICE void convolve(int thread, uint32_t group, const Region& tile, const float* memory) const {
    const int32_t tx = thread & ((1 << grid.log_x) - 1), ty = (thread >> grid.log_x) & ((1 << grid.log_y) - 1);
    const int32_t q = thread >> (grid.log_x + grid.log_y);
    const int32_t y = tile.y0 + ty * kRows * grid.steps.y, x = tile.x0 + tx * kColumns * grid.steps.x;
    const int64_t plane = kChannelsLast ? batch(group) : (int64_t{group} << grid.log_planes) + q;
    const int32_t c = kChannelsLast ? first_channel(group) + q : static_cast<int32_t>(plane % params.channels);
    if (q >= grid.planes() || y >= tile.y1 || x >= tile.x1) return;
    if (kChannelsLast ? c >= params.channels : plane >= num_planes()) return;

    const float start = bias ? static_cast<float>(bias[c]) : 0.0f;
    float sums[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[r][j] = start;
    }
    const float* filter = memory + stage.planar_floats() + q * filter_floats();
    const float* from = memory + (q * stage.rows + ty * kRows) * stage.pitch + tx * kColumns;
    for (int32_t ky = 0; ky < params.y.kernel; ++ky, from += stage.pitch, filter += filter_row()) {
      float window[kRows][kColumns + 4];
#pragma unroll
      for (int r = 0; r < kRows; ++r) read_part<0, kColumns>(from + r * stage.pitch, window[r]);
      int32_t kx = 0;
#pragma unroll 3
      for (; kx + 4 <= params.x.kernel; kx += 4) {
        take<4>(from + kx, filter + kx, 4, window, sums);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) window[r][i] = window[r][i + 4];
        }
      }
      if (kx < params.x.kernel) take<3>(from + kx, filter + kx, params.x.kernel - kx, window, sums);
    }

    const int64_t pixel = (plane * params.out_height + y) * params.out_width + x;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int32_t down = r * grid.steps.y, right = j * grid.steps.x;
        if (y + down >= tile.y1 || x + right >= tile.x1) continue;
        const int64_t at = pixel + int64_t{down} * params.out_width + right;
        out[kChannelsLast ? at * params.channels + c : at] = static_cast<T>(sums[r][j]);
      }
    }
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
  TORCHTP_HOST_DEVICE void take(const float* from, const float* filter, int32_t count,
                                float (&window)[kRows][kColumns + 4], float (&sums)[kRows][kColumns]) const {
    const auto taps = *reinterpret_cast<const Pack<float, 4>*>(filter);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      read_part<kColumns, kColumns + 4>(from + r * stage.pitch, window[r]);
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
