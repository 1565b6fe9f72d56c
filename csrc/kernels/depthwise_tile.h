#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_stage.h"

namespace torchtp::kernels {

// Kernel and stride known to the compiler, dilation 1. A thread keeps its channel's filter and kRows x kColumns outputs
// in registers; each row of the window that it reads from shared memory meets every output row it belongs to.
template <typename T, int kKernel, int kStride, bool kChannelsLast>
struct DepthwiseTile : NoTeams {
  static constexpr int kThreads = kChannelsLast ? 256 : 128;
  static constexpr int kBlocksPerSm = 512 / kThreads;
  static constexpr int kStepPhases = 2, kPhases = 2;
  static constexpr int kRows = 8 / kStride, kColumns = 4, kTaps = kKernel * kKernel;
  static constexpr int kWindow = (kColumns - 1) * kStride + kKernel;
  static constexpr int kWindowRows = (kRows - 1) * kStride + kKernel;
  using State = NoState;

  HaloPlanes<T> in;
  const T* weight;
  const T* bias;
  T* out;
  int64_t batches;
  int32_t out_height, out_width, offset_y, offset_x;
  bool mirrored;     // taps in reverse order
  bool stores_four;  // loads_four of `out`
  TileGrid grid;
  StageShape stage;

  static DepthwiseTile make(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                            const DepthwiseParams& params, const Regions& regions, bool mirrored, size_t most_shared) {
    // Channels last: a tile 4 threads wide is 16 columns, and with 2 below each other 16 rows.
    TileGrid grid = kChannelsLast ? tile_grid(8, 5, false, kRows, kColumns, 2, regions)
                                  : tile_grid(7, 0, true, kRows, kColumns, 4, regions);
    const int64_t innermost_in = kChannelsLast ? params.channels : params.in_width;
    const bool loads = loads_four(in.own, innermost_in);
    const bool stores = !kChannelsLast && loads_four(out, params.out_width);
    for (;;) {
      const int32_t rows = (grid.rows() - 1) * kStride + kKernel, columns = (grid.columns() - 1) * kStride + kKernel;
      const int32_t pitch = (grid.columns() - kColumns) * kStride + round_to_fours(kWindow);
      const DepthwiseTile program{{},
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
                                  stores,
                                  grid,
                                  stage_shape(grid.planes(), rows, columns, pitch, loads)};
      if (program.shared_bytes() <= most_shared || !shrink(grid, !kChannelsLast)) return program;
    }
  }

  TORCHTP_HOST_DEVICE int32_t chunks() const { return (in.channels + kLanes - 1) / kLanes; }
  TORCHTP_HOST_DEVICE int64_t num_planes() const { return batches * in.channels; }
  int64_t num_blocks() const {
    const int64_t groups = kChannelsLast ? batches * chunks() : (num_planes() + grid.planes() - 1) >> grid.log_planes;
    return groups * grid.tiles();
  }
  TORCHTP_HOST_DEVICE int32_t tile_floats() const {
    return kChannelsLast ? stage.interleaved_floats() : stage.planar_floats();
  }
  size_t shared_bytes() const { return sizeof(float) * (tile_floats() + grid.planes() * kTaps); }
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
  // Channels last: the first channel of the block, and its batch.
  TORCHTP_HOST_DEVICE int32_t first_channel(uint32_t group) const {
    return static_cast<int32_t>(group % static_cast<uint32_t>(chunks())) * kLanes;
  }
  TORCHTP_HOST_DEVICE int64_t batch(uint32_t group) const { return group / static_cast<uint32_t>(chunks()); }

  TORCHTP_HOST_DEVICE void bring(int thread, uint32_t group, const Region& tile, float* memory) const {
    const int32_t y0 = tile.y0 * kStride - offset_y, x0 = tile.x0 * kStride - offset_x;
    float* const filters = memory + tile_floats();
    const int64_t first_plane = int64_t{group} << grid.log_planes;
    for (int32_t i = thread; i < grid.planes() * kTaps; i += kThreads) {
      const int32_t q = i / kTaps, tap = mirrored ? kTaps - 1 - i % kTaps : i % kTaps;
      const int64_t plane = kChannelsLast ? first_channel(group) + q : first_plane + q;
      const bool there = plane < (kChannelsLast ? int64_t{in.channels} : num_planes());
      filters[i] = there ? static_cast<float>(weight[plane % in.channels * kTaps + tap]) : 0;
    }
    if constexpr (kChannelsLast) {
      stage_interleaved<kThreads>(in, stage, batch(group), first_channel(group), y0, x0, thread, memory);
    } else {
      stage_planar<kThreads>(in, stage, first_plane, num_planes(), y0, x0, thread, memory);
    }
  }

  TORCHTP_HOST_DEVICE void convolve(int thread, uint32_t group, const Region& tile, const float* memory) const {
    const int32_t q = kChannelsLast ? thread % kLanes : thread >> (grid.log_x + grid.log_y);
    const int32_t spot = kChannelsLast ? thread / kLanes : thread;
    if (spot >> (grid.log_x + grid.log_y) >= (kChannelsLast ? 1 : grid.planes())) return;
    const int32_t tx = spot & ((1 << grid.log_x) - 1), ty = (spot >> grid.log_x) & ((1 << grid.log_y) - 1);
    const int32_t y = tile.y0 + ty * kRows, x = tile.x0 + tx * kColumns;
    const int64_t plane = kChannelsLast ? batch(group) : (int64_t{group} << grid.log_planes) + q;
    const int32_t c = kChannelsLast ? first_channel(group) + q : static_cast<int32_t>(plane % in.channels);
    if (y >= tile.y1 || x >= tile.x1 || (kChannelsLast ? c >= in.channels : plane >= num_planes())) return;

    float filter[kTaps];
    const float* const filters = memory + tile_floats() + q * kTaps;
#pragma unroll
    for (int i = 0; i < kTaps; ++i) filter[i] = filters[i];
    const float start = bias ? static_cast<float>(bias[c]) : 0.0f;
    float sums[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[r][j] = start;
    }

    const int32_t row_floats = kChannelsLast ? stage.columns * kLanes : stage.pitch;
    const float* from = kChannelsLast
                            ? memory + (ty * kRows * kStride * stage.columns + tx * kColumns * kStride) * kLanes + q
                            : memory + (q * stage.rows + ty * kRows * kStride) * stage.pitch + tx * kColumns * kStride;
#pragma unroll
    for (int v = 0; v < kWindowRows; ++v, from += row_floats) {
      float row[kWindow];
      read_row<kWindow, kChannelsLast>(from, row);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int ky = v - r * kStride;
        if (ky < 0 || ky >= kKernel) continue;
#pragma unroll
        for (int kx = 0; kx < kKernel; ++kx) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) sums[r][j] += row[j * kStride + kx] * filter[ky * kKernel + kx];
        }
      }
    }

    // One of the two extents is what `own_index` of an output needs, but `in` has the input's.
    const int64_t pixel = (plane * out_height + y) * out_width + x;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (y + r >= tile.y1) return;
      const int64_t first = pixel + int64_t{r} * out_width;
      if (stores_four && x % 4 == 0 && x + 4 <= tile.x1) {
        Pack<T, 4> four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.values[j] = static_cast<T>(sums[r][j]);
        *reinterpret_cast<Pack<T, 4>*>(out + first) = four;
      } else {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          if (x + j < tile.x1) {
            out[kChannelsLast ? (first + j) * in.channels + c : first + j] = static_cast<T>(sums[r][j]);
          }
        }
      }
    }
  }
};

}  // namespace torchtp::kernels
