#pragma once

#include "kernels/band_grid.h"
#include "kernels/band_stage.h"
#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/matrix_tile.h"

namespace torchtp::kernels {

// A depthwise convolution of 16-bit numbers with unit steps, as products of matrices that the tensor cores take, sums
// in float. Eight neighbouring outputs of a row read up to 16 inputs: 16 rows of those, for each row of the filter,
// times a matrix [16, 8] that holds the row's taps along a band beside its diagonal and zeros elsewhere. What is
// infinite or not a number among the 16 reaches all eight. `mirrored`: taps in reverse order, as for the gradient of
// the input.
template <typename T, int kKernel, bool kChannelsLast>
struct DepthwiseBand : NoTeams {
  static_assert(sizeof(T) == 2 && kKernel <= 9, "eight outputs of a row have to find their inputs in 16");
  static constexpr int kThreads = kChannelsLast ? 256 : 128;
  static constexpr int kBlocksPerSm = kChannelsLast ? 3 : 6;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kStepPhases = 3, kPhases = 4;
  // Of a plane's filter: rows 16 apart with zeros between them, 8 before the first; twice, the second time a number
  // further, so that a pair from any number on is a word of one of them.
  static constexpr int kFilter = 16 * kKernel + 16;
  struct State {
    float sums[4][4];
  };

  HaloPlanes<T> in;
  const T* weight;
  const T* bias;
  T* out;
  int64_t batches;
  int32_t out_height, out_width, offset_y, offset_x;
  bool mirrored;
  bool loads, stores;  // whole chunks of the input where channels come last; of the output
  BandGrid grid;
  BandShape shape;
  Divider chunks, channels;  // of channels, as a block has planes, where they come last

  static DepthwiseBand make(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                            const DepthwiseParams& params, const Regions& regions, bool mirrored, size_t most_shared) {
    BandGrid grid = kChannelsLast ? BandGrid::make(0, 4, 1, 0, regions) : BandGrid::make(3, -1, 2, 1, regions);
    for (;;) {
      const DepthwiseBand program{{},
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
                                  loads_eights(in),
                                  aligned<T>(kChannelsLast ? in.channels : params.out_width, 8, {out}),
                                  grid,
                                  BandShape::make(grid.planes(), grid.rows() + kKernel - 1, grid.columns() / 8 + 1),
                                  Divider((in.channels + grid.planes() - 1) / grid.planes()),
                                  Divider(in.channels)};
      if (program.shared_bytes() <= most_shared || !grid.shrink()) return program;
    }
  }

  TORCHTP_HOST_DEVICE int64_t num_planes() const { return batches * in.channels; }
  int64_t num_blocks() const {
    const int64_t groups =
        kChannelsLast ? batches * chunks.divisor : (num_planes() + grid.planes() - 1) / grid.planes();
    return groups * grid.num_tiles();
  }
  // A part of fewer than four matrices reads a chunk more than it needs.
  TORCHTP_HOST_DEVICE int32_t tile_numbers() const { return shape.numel() + 8; }
  size_t shared_bytes() const { return sizeof(T) * starts_at() + sizeof(float) * grid.planes(); }
  TORCHTP_HOST_DEVICE int32_t starts_at() const { return tile_numbers() + grid.planes() * 2 * kFilter; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return (grid.tasks() + kWarps - 1) / kWarps; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    T* const tile = static_cast<T*>(shared);
    if constexpr (kPhase == 0) {
      if (step == 0) bring(place.thread, static_cast<int32_t>(place.block), tile);
    } else if constexpr (kPhase == 3) {
      take(place.thread, static_cast<int32_t>(place.block), tile);
    } else {
      const int32_t number = step * kWarps + place.thread / 32;
      if (number >= grid.tasks()) return;
      const BandTask task(grid, number);
      if constexpr (kPhase == 1) {
        multiply(place.thread % 32, task, tile, state);
      } else {
        lay(place.thread % 32, task, tile, state);
      }
    }
  }

 private:
  // Where channels come first, `plane` is the first one of a block; where they come last, its batch and first channel.
  struct Spot {
    int64_t plane;
    int32_t channel;
    BandGrid::Tile tile;
  };
  TORCHTP_HOST_DEVICE Spot spot(int32_t block) const {
    const int32_t group = grid.tiles.quotient(block);
    const BandGrid::Tile tile = grid.tile(block - group * grid.tiles.divisor);
    if constexpr (kChannelsLast) {
      const int32_t batch = chunks.quotient(group);
      return {batch, (group - batch * chunks.divisor) << grid.log_planes, tile};
    } else {
      const int32_t plane = group << grid.log_planes;
      return {plane, channels.rest(plane), tile};
    }
  }

  TORCHTP_HOST_DEVICE void bring(int thread, int32_t block, T* tile) const {
    const Spot at = spot(block);
    const auto channel = [&](int32_t q) {
      return kChannelsLast ? at.channel + q : channels.rest(static_cast<int32_t>(at.plane) + q);
    };
    T* const filters = tile + tile_numbers();
    for (int32_t i = thread; i < grid.planes() * kFilter; i += kThreads) {
      const int32_t q = i / kFilter, word = i % kFilter, second = word / (kFilter / 2);
      const int32_t first = word % (kFilter / 2) * 2 + second, c = channel(q);
      set_word(filters + 2 * i, paired<T>(filter_number(c, first), filter_number(c, first + 1)));
    }
    float* const starts = reinterpret_cast<float*>(tile + starts_at());
    for (int32_t q = thread; q < grid.planes(); q += kThreads) {
      const int32_t c = channel(q);
      starts[q] = bias && c < in.channels ? static_cast<float>(bias[c]) : 0;
    }
    const int32_t y0 = at.tile.y0 - offset_y, x0 = at.tile.x0 - offset_x;
    if constexpr (kChannelsLast) {
      stage_pixels<kThreads>(in, loads, shape, at.plane, at.channel, y0, x0, thread, tile);
    } else {
      stage_chunks<kThreads>(in, shape, at.plane, num_planes(), y0, x0, thread, tile);
    }
  }

  TORCHTP_HOST_DEVICE float filter_number(int32_t c, int32_t at) const {
    const int32_t ky = (at - 8) >> 4, kx = (at - 8) & 15;
    if (ky < 0 || ky >= kKernel || kx >= kKernel || c >= in.channels) return 0;
    const int32_t tap = mirrored ? kKernel * kKernel - 1 - (ky * kKernel + kx) : ky * kKernel + kx;
    return static_cast<float>(weight[int64_t{c} * (kKernel * kKernel) + tap]);
  }

  TORCHTP_HOST_DEVICE const T* first_input(const BandTask& task, const T* tile) const {
    return tile + shape.plane(task.plane) + 16 * task.strip * shape.pitch + 8 * grid.pieces * task.part;
  }

  TORCHTP_HOST_DEVICE void multiply(int lane, const BandTask& task, const T* tile, State& state) const {
    const float start = reinterpret_cast<const float*>(tile + starts_at())[task.plane];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.sums[j][i] = start;
    }
    const T* const inputs = first_input(task, tile);
    const T* const filter = tile + tile_numbers() + task.plane * 2 * kFilter;
    const int g = row_of(lane), t2 = column_of(lane);
#ifdef __CUDA_ARCH__
    const T* row = inputs + lane % 16 * shape.pitch + lane / 16 * 8;
    const T* const pair = filter + (g & 1) * (kFilter - 1) + 8 + t2 - g;
#pragma unroll
    for (int ky = 0; ky < kKernel; ++ky, row += shape.pitch) {
      const uint32_t right0 = word_at(pair + 16 * ky), right1 = word_at(pair + 16 * ky + 8);
      uint32_t left[10];
      load_four<false>(row, left[0], left[1], left[2], left[3]);
      if (grid.pieces > 1) load_four<false>(row + 16, left[4], left[5], left[6], left[7]);
      if (grid.pieces > 2) load_two<false>(row + 32, left[8], left[9]);
      multiply_add<T>(state.sums[0], left[0], left[1], left[2], left[3], right0, right1);
      if (grid.pieces > 1) multiply_add<T>(state.sums[1], left[2], left[3], left[4], left[5], right0, right1);
      if (grid.pieces > 2) {
        multiply_add<T>(state.sums[2], left[4], left[5], left[6], left[7], right0, right1);
        multiply_add<T>(state.sums[3], left[6], left[7], left[8], left[9], right0, right1);
      }
    }
#else
    for (int j = 0; j < grid.pieces; ++j) {
      for (int i = 0; i < 4; ++i) {
        for (int ky = 0; ky < kKernel; ++ky) {
          for (int kx = 0; kx < kKernel; ++kx) {
            const T input = inputs[(g + i / 2 * 8 + ky) * shape.pitch + 8 * j + t2 + i % 2 + kx];
            state.sums[j][i] += static_cast<float>(input) * static_cast<float>(filter[8 + 16 * ky + kx]);
          }
        }
      }
    }
#endif
  }

  TORCHTP_HOST_DEVICE void lay(int lane, const BandTask& task, T* tile, const State& state) const {
    T* const to = tile + (first_input(task, tile) - tile) + row_of(lane) * shape.pitch + column_of(lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j >= grid.pieces) break;
      set_word(to + 8 * j, paired<T>(state.sums[j][0], state.sums[j][1]));
      set_word(to + 8 * shape.pitch + 8 * j, paired<T>(state.sums[j][2], state.sums[j][3]));
    }
  }

  TORCHTP_HOST_DEVICE void take(int thread, int32_t block, const T* tile) const {
    const Spot at = spot(block);
    if constexpr (kChannelsLast) {
      take_pixels<kThreads>(shape, tile, at.plane, at.channel, in.channels, out_height, out_width, grid.rows(),
                            at.tile.y0, at.tile.x0, at.tile.region, stores, thread, out);
    } else {
      take_chunks<kThreads>(shape, tile, at.plane, num_planes(), out_height, out_width, grid.rows(), at.tile.y0,
                            at.tile.x0, at.tile.region, stores, thread, out);
    }
  }
};

}  // namespace torchtp::kernels
