#pragma once

#include <algorithm>

#include "kernels/band_grid.h"
#include "kernels/band_pixels.h"
#include "kernels/band_rows.h"
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
  static constexpr int kBlocksPerSm = kChannelsLast ? 4 : 8;
  static constexpr int kLogWarps = kChannelsLast ? 3 : 2, kWarps = 1 << kLogWarps;
  static constexpr int kAhead = 2;  // pairs of pixels
  // Bring rows; where channels come first, the columns that share a chunk with them; then a step for each of a warp's
  // planes.
  static constexpr int kFirstPhases = kChannelsLast ? 1 : 2, kStepPhases = 3, kPhases = kFirstPhases + kStepPhases;
  // Of each tap a sum for each of eight columns, columns so far apart that a warp meets different banks.
  static constexpr int kTaps = kKernel * kKernel, kColumn = (kTaps - 5 + 15) / 16 * 16 + 5, kSums = 8 * kColumn;
  struct State {
    float sums[kKernel][4];
  };

  HaloPlanes<T> points;
  HaloPlanes<T> window;
  float* partial;  // [splits, C, kTaps]
  int64_t batches;
  int32_t offset_y, offset_x;
  int32_t lead;  // columns that the window begins earlier, for where memory is best read
  int32_t splits;
  bool mirrored;
  bool loads_points, loads_window;  // whole chunks of channels, or halves of rows
  BandGrid grid;
  BandShape point_shape, window_shape;
  Divider chunks;  // of channels, as a block has planes

  static DepthwiseWeightBand make(const HaloPlanes<T>& points, const HaloPlanes<T>& window, float* partial,
                                  int64_t batches, int32_t offset_y, int32_t offset_x, bool mirrored,
                                  size_t most_shared) {
    const Regions regions{{0, points.height, 0, points.width}, {}};
    const BandLead lead = BandLead::make<kChannelsLast>(window, offset_x, kKernel);
    DepthwiseWeightBand program{};
    program.points = points;
    program.window = window;
    program.partial = partial;
    program.batches = batches;
    program.offset_y = offset_y;
    program.offset_x = offset_x;
    program.lead = lead.columns;
    program.mirrored = mirrored;
    program.loads_points = BandLead::make<kChannelsLast>(points, 0, kKernel).loads;
    program.loads_window = lead.loads;
    program.grid = kChannelsLast ? BandGrid::make(0, 4, 0, 0, regions) : BandGrid::make(3, -1, 2, 1, regions);
    BandGrid& grid = program.grid;
    if (!kChannelsLast && grid.log_planes > kLogWarps) grid.log_planes = kLogWarps;
    for (;;) {
      const int32_t chunks = grid.columns() / 8;
      program.point_shape = BandShape::make(grid.planes(), grid.rows(), chunks);
      program.window_shape =
          BandShape::make(grid.planes(), grid.rows() + kKernel - 1, chunks + 1, kChannelsLast ? 2 * kSums : 0);
      if (program.shared_bytes() <= most_shared || !grid.shrink()) break;
    }
    program.chunks = Divider((points.channels + grid.planes() - 1) / grid.planes());
    // A block takes one tile of a batch: sums that were kept from tile to tile would be in the way of loading it.
    program.splits = static_cast<int32_t>(batches) * grid.num_tiles();
    return program;
  }

  int64_t num_blocks() const { return int64_t{chunks.divisor} * splits; }
  // Of a warp where channels come last; else several warps may share a plane.
  TORCHTP_HOST_DEVICE int32_t planes_of_warp() const { return kChannelsLast ? grid.planes() >> kLogWarps : 1; }
  TORCHTP_HOST_DEVICE int32_t shares() const { return kChannelsLast ? 1 : kWarps >> grid.log_planes; }
  size_t shared_bytes() const {
    const size_t tiles = sizeof(T) * (window_shape.numel() + point_shape.numel());
    return std::max(tiles, sizeof(float) * kWarps * kSums);
  }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return planes_of_warp(); }
  static constexpr Meeting meets(int phase) {
    return kChannelsLast && phase >= kFirstPhases ? Meeting::kWarp : Meeting::kBlock;
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    const auto block = static_cast<int32_t>(place.block), split = chunks.quotient(block);
    const int32_t first_channel = (block - split * chunks.divisor) << grid.log_planes;
    T* const tiles = static_cast<T*>(shared);
    constexpr int kStepPhase = kPhase - kFirstPhases;
    int32_t thread = place.thread;
    if constexpr (kStepPhase > 0) not_before(thread);  // addresses would take registers from the products
    const int warp = thread / 32, lane = thread % 32;
    if constexpr (kStepPhase < 0) {
      const int32_t n = grid.tiles.quotient(split);
      const BandGrid::Tile at = grid.tile(split - n * grid.tiles.divisor);
      if constexpr (kPhase == 0) {
        bring(thread, n, first_channel, at, tiles);
      } else {
        bring_columns(thread, n, first_channel, at, tiles);
      }
    } else {
      const int32_t plane = kChannelsLast ? step * kWarps + warp : warp & (grid.planes() - 1);
      const int32_t share = kChannelsLast ? 0 : warp >> grid.log_planes;
      // Where the tiles were: of a warp's own plane where channels come last, so that it waits for nobody.
      float* const memory = reinterpret_cast<float*>(tiles + (kChannelsLast ? window_shape.plane(plane) : 0));
      if constexpr (kStepPhase == 0) {
#pragma unroll
        for (int ky = 0; ky < kKernel; ++ky) {
#pragma unroll
          for (int k = 0; k < 4; ++k) state.sums[ky][k] = 0;
        }
        for (int32_t task = share; task < grid.plane_tasks(); task += shares()) {
          multiply(lane, BandTask(grid, task << grid.log_planes | plane), tiles, state.sums);
        }
      } else if constexpr (kStepPhase == 1) {
        lay(lane, state.sums, memory + (kChannelsLast ? 0 : plane * shares() + share) * kSums);
      } else if constexpr (kChannelsLast) {
#pragma unroll 1
        for (int32_t tap = lane; tap < kTaps; tap += 32) add(split, first_channel + plane, tap, memory);
      } else {
        for (int32_t i = thread; i < grid.planes() * kTaps; i += kThreads) {
          add(split, first_channel + i / kTaps, i % kTaps, memory + i / kTaps * shares() * kSums);
        }
      }
    }
  }

 private:
  TORCHTP_HOST_DEVICE void bring(int thread, int64_t n, int32_t first_channel, const BandGrid::Tile& at,
                                 T* tiles) const {
    T* const point_tile = tiles + window_shape.numel();
    const int32_t y0 = at.y0 - offset_y, x0 = at.x0 - offset_x - lead;
    if constexpr (kChannelsLast) {
      stage_pixels<kThreads, kAhead, false>(points, loads_points, point_shape, n, first_channel, at.y0, at.x0, thread,
                                            point_tile);
      stage_pixels<kThreads, kAhead>(window, loads_window, window_shape, n, first_channel, y0, x0, thread, tiles);
    } else {
      const int64_t first = n * points.channels + first_channel, end = (n + 1) * points.channels;
      if (loads_points) {
        stage_halves<kThreads, false>(points, point_shape, first, end, at.y0, at.x0, thread, point_tile);
      } else {
        stage_chunks<kThreads, false>(points, point_shape, first, end, at.y0, at.x0, thread, point_tile);
      }
      if (loads_window) {
        stage_halves<kThreads>(window, window_shape, first, end, y0, x0, thread, tiles);
        stage_edges<kThreads>(window, window_shape, first, end, y0, x0, thread, tiles);
      } else {
        stage_chunks<kThreads>(window, window_shape, first, end, y0, x0, thread, tiles);
      }
      copies_arrived();
    }
  }

  TORCHTP_HOST_DEVICE void bring_columns(int thread, int64_t n, int32_t first_channel, const BandGrid::Tile& at,
                                         T* tiles) const {
    if (loads_window || window.columns_left + window.columns_right == 0) return;
    const int64_t first = n * points.channels + first_channel, end = (n + 1) * points.channels;
    stage_both_columns<kThreads>(window, window_shape, first, end, at.y0 - offset_y, at.x0 - offset_x - lead, thread,
                                 tiles);
  }

  TORCHTP_HOST_DEVICE void multiply(int lane, const BandTask& task, const T* tiles, float (&sums)[kKernel][4]) const {
    const int32_t column = 8 * grid.pieces * task.part;
    const T* const seen = tiles + window_shape.plane(task.plane) + 16 * task.strip * window_shape.pitch + column;
    const T* const own =
        tiles + window_shape.numel() + point_shape.plane(task.plane) + 16 * task.strip * point_shape.pitch + column;
    if (grid.pieces == 4) {
      multiply_pieces<4>(lane, seen, own, sums);
    } else if (grid.pieces == 2) {
      multiply_pieces<2>(lane, seen, own, sums);
    } else {
      multiply_pieces<1>(lane, seen, own, sums);
    }
  }

  template <int kPieces>
  TORCHTP_HOST_DEVICE void multiply_pieces(int lane, const T* seen, const T* own, float (&sums)[kKernel][4]) const {
#ifdef __CUDA_ARCH__
    const T* const mine = own + lane % 16 * point_shape.pitch + lane / 16 * 8;
    const T* from = seen + lane % 16 * window_shape.pitch + lane / 16 * 8;
    uint32_t right[2 * kPieces];
    if constexpr (kPieces == 1) {
      load_two<true>(own + lane % 16 * point_shape.pitch, right[0], right[1]);
    } else {
      load_four<true>(mine, right[0], right[1], right[2], right[3]);
    }
    if constexpr (kPieces == 4) load_four<true>(mine + 16, right[4], right[5], right[6], right[7]);
#pragma unroll
    for (int ky = 0; ky < kKernel; ++ky, from += window_shape.pitch) {
      uint32_t left[2 * kPieces + 2];
      load_four<true>(from, left[0], left[1], left[2], left[3]);
      if constexpr (kPieces == 4) load_four<true>(from + 16, left[4], left[5], left[6], left[7]);
      if constexpr (kPieces > 1) load_two<true>(from + 8 * kPieces, left[2 * kPieces], left[2 * kPieces + 1]);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        multiply_add<T>(sums[ky], left[2 * j], left[2 * j + 2], left[2 * j + 1], left[2 * j + 3], right[2 * j],
                        right[2 * j + 1]);
      }
    }
#else
    for (int ky = 0; ky < kKernel; ++ky) {
      for (int i = 0; i < 4; ++i) {
        const int m = row_of(lane) + i / 2 * 8, n = column_of(lane) + i % 2;
        for (int j = 0; j < kPieces; ++j) {
          for (int k = 0; k < 16; ++k) {
            sums[ky][i] += static_cast<float>(seen[(k + ky) * window_shape.pitch + 8 * j + m]) *
                           static_cast<float>(own[k * point_shape.pitch + 8 * j + n]);
          }
        }
      }
    }
#endif
  }

  TORCHTP_HOST_DEVICE void lay(int lane, const float (&sums)[kKernel][4], float* to) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = column_of(lane) + i % 2, kx = row_of(lane) + i / 2 * 8 - n - lead;
      if (kx < 0 || kx >= kKernel) continue;
#pragma unroll
      for (int ky = 0; ky < kKernel; ++ky) to[n * kColumn + ky * kKernel + kx] = sums[ky][i];
    }
  }

  TORCHTP_HOST_DEVICE void add(int32_t split, int32_t channel, int32_t tap, const float* from) const {
    if (channel >= points.channels) return;
    float sum = 0;
    for (int32_t share = 0; share < shares(); ++share) {
#pragma unroll
      for (int n = 0; n < 8; ++n) sum += from[share * kSums + n * kColumn + tap];
    }
    partial[(int64_t{split} * points.channels + channel) * kTaps + (mirrored ? kTaps - 1 - tap : tap)] = sum;
  }
};

}  // namespace torchtp::kernels
