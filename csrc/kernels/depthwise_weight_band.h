#pragma once

#include "kernels/band_grid.h"
#include "kernels/band_stage.h"
#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/matrix_tile.h"

namespace torchtp::kernels {

// sums[tap] = sum over points q of points[q] * window[q + tap - offset] for 16-bit numbers and unit steps, by tensor
// cores, sums in float: for each row of taps 16 columns of the window, transposed, times 8 columns of points, both of
// 16 rows, give the products of all pairs of their columns; those 0 to kKernel - 1 apart are a row of taps. The points
// are of (input, output's gradient) the one without halo; `mirrored` where that is the input: taps run in reverse
// order.
template <typename T, int kKernel, bool kChannelsLast>
struct DepthwiseWeightBand : NoTeams {
  static_assert(sizeof(T) == 2 && kKernel <= 9, "eight points of a row have to find their window in 16 columns");
  static constexpr int kThreads = kChannelsLast ? 256 : 128;
  static constexpr int kBlocksPerSm = kChannelsLast ? 2 : 6;
  static constexpr int kLogWarps = kChannelsLast ? 3 : 2, kWarps = 1 << kLogWarps,
                       kEach = kChannelsLast ? 2 : 1;  // planes of a warp
  static constexpr int kStepPhases = 4, kPhases = 4;
  static constexpr int kTaps = kKernel * kKernel, kSums = 16 * 8 * kKernel;
  struct State {
    float sums[kEach][kKernel][4];
  };

  HaloPlanes<T> points;
  HaloPlanes<T> window;
  float* partial;  // [splits, C, kTaps]
  int64_t batches;
  int32_t offset_y, offset_x;
  int32_t splits;
  bool mirrored;
  bool loads_points, loads_window;  // whole chunks where channels come last
  BandGrid grid;
  BandShape point_shape, window_shape;
  Divider chunks;  // of channels, as a block has planes

  static DepthwiseWeightBand make(const HaloPlanes<T>& points, const HaloPlanes<T>& window, float* partial,
                                  int64_t batches, int32_t offset_y, int32_t offset_x, bool mirrored,
                                  size_t most_shared) {
    const Regions regions{{0, points.height, 0, points.width}, {}};
    DepthwiseWeightBand program{};
    program.points = points;
    program.window = window;
    program.partial = partial;
    program.batches = batches;
    program.offset_y = offset_y;
    program.offset_x = offset_x;
    program.mirrored = mirrored;
    program.loads_points = loads_eights(points);
    program.loads_window = loads_eights(window);
    program.grid = kChannelsLast ? BandGrid::make(0, 4, 1, 0, regions) : BandGrid::make(3, -1, 2, 1, regions);
    BandGrid& grid = program.grid;
    if (!kChannelsLast && grid.log_planes > kLogWarps) grid.log_planes = kLogWarps;
    for (;;) {
      const int32_t chunks = grid.columns() / 8;
      program.point_shape = BandShape::make(grid.planes(), grid.rows(), chunks);
      program.window_shape = BandShape::make(grid.planes(), grid.rows() + kKernel - 1, chunks + 1);
      if (program.shared_bytes() <= most_shared || !grid.shrink()) break;
    }
    program.chunks = Divider((points.channels + grid.planes() - 1) / grid.planes());
    // A block takes one tile of a batch: sums that were kept from tile to tile would be in the way of loading it.
    program.splits = static_cast<int32_t>(batches) * grid.num_tiles();
    return program;
  }

  int64_t num_blocks() const { return int64_t{chunks.divisor} * splits; }
  // A part of fewer than four matrices reads a chunk more than it needs.
  TORCHTP_HOST_DEVICE int32_t window_numbers() const { return window_shape.numel() + 8; }
  // Channels first several warps may share a plane.
  TORCHTP_HOST_DEVICE int32_t shares() const { return kChannelsLast ? 1 : kWarps >> grid.log_planes; }
  size_t shared_bytes() const {
    const size_t tiles = sizeof(T) * (window_numbers() + point_shape.numel() + 8);
    const size_t sums = sizeof(float) * kWarps * kEach * kSums;
    return tiles > sums ? tiles : sums;
  }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State& state, void* shared) const {
    const auto block = static_cast<int32_t>(place.block), split = chunks.quotient(block);
    const int32_t first_channel = (block - split * chunks.divisor) << grid.log_planes;
    T* const tiles = static_cast<T*>(shared);
    float* const memory = static_cast<float*>(shared);
    const int warp = place.thread / 32, lane = place.thread % 32;
    if constexpr (kPhase == 0) {
      const int32_t n = grid.tiles.quotient(split);
      bring(place.thread, n, first_channel, grid.tile(split - n * grid.tiles.divisor), tiles);
    } else if constexpr (kPhase == 1) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int ky = 0; ky < kKernel; ++ky) {
#pragma unroll
          for (int k = 0; k < 4; ++k) state.sums[i][ky][k] = 0;  // not before: their registers have other uses
        }
        for (int32_t task = share_of(warp); task < grid.plane_tasks(); task += shares()) {
          not_before(task);
          multiply(lane, BandTask(grid, task << grid.log_planes | plane_of(warp, i)), tiles, state.sums[i]);
        }
      }
    } else if constexpr (kPhase == 2) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        float* const to = memory + (plane_of(warp, i) * shares() + share_of(warp)) * kSums;
        lay(lane, state.sums[i], to);
      }
    } else {
      add(place.thread, split, first_channel, memory);
    }
  }

 private:
  TORCHTP_HOST_DEVICE int32_t plane_of(int warp, int i) const {
    return kChannelsLast ? warp * kEach + i : warp & (grid.planes() - 1);
  }
  TORCHTP_HOST_DEVICE int32_t share_of(int warp) const { return kChannelsLast ? 0 : warp >> grid.log_planes; }

  TORCHTP_HOST_DEVICE void bring(int thread, int64_t n, int32_t first_channel, const BandGrid::Tile& at,
                                 T* tiles) const {
    T* const point_tile = tiles + window_numbers();
    const int32_t y0 = at.y0 - offset_y, x0 = at.x0 - offset_x;
    if constexpr (kChannelsLast) {
      stage_pixels<kThreads, false>(points, loads_points, point_shape, n, first_channel, at.y0, at.x0, thread,
                                    point_tile);
      stage_pixels<kThreads>(window, loads_window, window_shape, n, first_channel, y0, x0, thread, tiles);
    } else {
      const int64_t first = n * points.channels + first_channel, end = (n + 1) * points.channels;
      stage_chunks<kThreads, false>(points, point_shape, first, end, at.y0, at.x0, thread, point_tile);
      stage_chunks<kThreads>(window, window_shape, first, end, y0, x0, thread, tiles);
    }
  }

  TORCHTP_HOST_DEVICE void multiply(int lane, const BandTask& task, const T* tiles, float (&sums)[kKernel][4]) const {
    const int32_t column = 8 * grid.pieces * task.part;
    const T* const seen = tiles + window_shape.plane(task.plane) + 16 * task.strip * window_shape.pitch + column;
    const T* const own =
        tiles + window_numbers() + point_shape.plane(task.plane) + 16 * task.strip * point_shape.pitch + column;
#ifdef __CUDA_ARCH__
    const T* mine = own + lane % 16 * point_shape.pitch + lane / 16 * 8;
    const T* row = seen + lane % 16 * window_shape.pitch + lane / 16 * 8;
    // Two matrices of points at a time: with all four the sums of two planes would not fit into the registers.
#pragma unroll 1
    for (int32_t left_over = grid.pieces; left_over > 0; left_over -= 2, mine += 16, row += 16) {
      uint32_t right[4];
      load_four<true>(mine, right[0], right[1], right[2], right[3]);
      const T* from = row;
#pragma unroll
      for (int ky = 0; ky < kKernel; ++ky, from += window_shape.pitch) {
        uint32_t left[6];
        load_four<true>(from, left[0], left[1], left[2], left[3]);
        multiply_add<T>(sums[ky], left[0], left[2], left[1], left[3], right[0], right[1]);
        if (left_over > 1) {
          load_two<true>(from + 16, left[4], left[5]);
          multiply_add<T>(sums[ky], left[2], left[4], left[3], left[5], right[2], right[3]);
        }
      }
    }
#else
    for (int ky = 0; ky < kKernel; ++ky) {
      for (int i = 0; i < 4; ++i) {
        const int m = row_of(lane) + i / 2 * 8, n = column_of(lane) + i % 2;
        if (m - n < 0 || m - n >= kKernel) continue;
        for (int j = 0; j < grid.pieces; ++j) {
          for (int k = 0; k < 16; ++k) {
            sums[ky][i] += static_cast<float>(seen[(k + ky) * window_shape.pitch + 8 * j + m]) *
                           static_cast<float>(own[k * point_shape.pitch + 8 * j + n]);
          }
        }
      }
    }
#endif
  }

  TORCHTP_HOST_DEVICE static void lay(int lane, const float (&sums)[kKernel][4], float* to) {
#pragma unroll
    for (int ky = 0; ky < kKernel; ++ky) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[ky * 128 + (row_of(lane) + i / 2 * 8) * 8 + column_of(lane) + i % 2] = sums[ky][i];
      }
    }
  }

  TORCHTP_HOST_DEVICE void add(int thread, int32_t split, int32_t first_channel, const float* memory) const {
    for (int32_t i = thread; i < grid.planes() * kTaps; i += kThreads) {
      const int32_t q = i / kTaps, tap = i - q * kTaps, ky = tap / kKernel, kx = tap - ky * kKernel;
      if (first_channel + q >= points.channels) return;
      float sum = 0;
      for (int32_t share = 0; share < shares(); ++share) {
        const float* const from = memory + (q * shares() + share) * kSums + ky * 128;
        for (int n = 0; n < 8; ++n) sum += from[(n + kx) * 8 + n];
      }
      partial[(int64_t{split} * points.channels + first_channel + q) * kTaps + (mirrored ? kTaps - 1 - tap : tap)] =
          sum;
    }
  }
};

}  // namespace torchtp::kernels
