#pragma once

#include "kernels/band_filter.h"
#include "kernels/band_grid.h"
#include "kernels/band_pixels.h"
#include "kernels/band_rows.h"
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
  using Filter = BandFilter<T, kKernel>;
  static constexpr int kThreads = kChannelsLast ? 256 : 128;
  static constexpr int kBlocksPerSm = kChannelsLast ? 3 : 8;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kAhead = 3;  // pairs of pixels
  // Channels last: bring; multiply and lay where the inputs lay, which no other warp reads; meet, take. Channels first:
  // bring rows, then the columns that share a chunk with them; multiply, lay apart and take.
  static constexpr int kFirstPhases = kChannelsLast ? 1 : 2, kStepPhases = kChannelsLast ? 2 : 3, kPhases = 5;
  // Of a warp's results: numbers of a row, of which eight begin in different banks, and of all.
  static constexpr int kPitchApart = 40, kApart = kChannelsLast ? 0 : 16 * kPitchApart;
  struct State {
    float sums[4][4];
  };

  HaloPlanes<T> in;
  const T* weight;
  const T* bias;
  T* out;
  int64_t batches;
  int32_t out_height, out_width, offset_y, offset_x;
  int32_t lead;  // columns that a tile begins earlier, for where memory is best read
  bool mirrored;
  bool loads, stores;  // the input: whole chunks of channels or halves of rows; the output: whole chunks
  BandGrid grid;
  BandShape shape;
  Divider chunks, channels;  // of channels, as a block has planes, where they come last

  static DepthwiseBand make(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                            const DepthwiseParams& params, const Regions& regions, bool mirrored, size_t most_shared) {
    BandGrid grid = kChannelsLast ? BandGrid::make(0, 4, 1, 0, regions) : BandGrid::make(3, -1, 2, 1, regions);
    const BandLead lead = BandLead::make<kChannelsLast>(in, params.x.offset, kKernel);
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
                                  lead.columns,
                                  mirrored,
                                  lead.loads,
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
  size_t shared_bytes() const { return sizeof(T) * starts_at() + sizeof(float) * grid.planes(); }
  // In numbers: the tile, filters, what warps lay apart, what sums start with.
  TORCHTP_HOST_DEVICE int32_t apart_at() const { return shape.numel() + grid.planes() * Filter::kBoth; }
  TORCHTP_HOST_DEVICE int32_t starts_at() const { return apart_at() + kWarps * kApart; }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return (grid.tasks() + kWarps - 1) / kWarps; }
  static constexpr Meeting meets(int phase) {
    const bool warps = phase >= kFirstPhases && phase < kFirstPhases + kStepPhases;
    return warps ? Meeting::kWarp : Meeting::kBlock;
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    T* const tile = static_cast<T*>(shared);
    const auto block = static_cast<int32_t>(place.block);
    constexpr int kStepPhase = kPhase - kFirstPhases;
    if constexpr (kPhase == 0) {
      bring(place.thread, block, tile);
    } else if constexpr (kStepPhase < 0) {
      bring_columns(place.thread, block, tile);
    } else if constexpr (kStepPhase < kStepPhases) {
      const int32_t warp = place.thread / 32, number = step * kWarps + warp;
      if (number >= grid.tasks()) return;
      const BandTask task(grid, number);
      T* const apart = tile + apart_at() + warp * kApart;
      if constexpr (kStepPhase == 0) {
        multiply(place.thread % 32, task, tile, state);
      } else if constexpr (kStepPhase == 2) {
        take(place.thread % 32, task, block, apart);
      } else if constexpr (kChannelsLast) {
        lay(place.thread % 32, state, shape.pitch, tile + (first_input(task, tile) - tile));
      } else {
        lay(place.thread % 32, state, kPitchApart, apart);
      }
    } else if constexpr (kPhase == kPhases - 1) {
      take_all(place.thread, block, tile);
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
    const int32_t y0 = at.tile.y0 - offset_y, x0 = at.tile.x0 - offset_x - lead;
    if constexpr (kChannelsLast) {
      stage_pixels<kThreads, kAhead>(in, loads, shape, at.plane, at.channel, y0, x0, thread, tile);
    } else if (loads) {
      stage_halves<kThreads>(in, shape, at.plane, num_planes(), y0, x0, thread, tile);
      stage_edges<kThreads>(in, shape, at.plane, num_planes(), y0, x0, thread, tile);
    } else {
      stage_chunks<kThreads>(in, shape, at.plane, num_planes(), y0, x0, thread, tile);
    }
    const auto channel = [&](int32_t q) {
      return kChannelsLast ? at.channel + q : channels.rest(static_cast<int32_t>(at.plane) + q);
    };
    T* const filters = tile + shape.numel();
    for (int32_t i = thread; i < grid.planes() * Filter::kRows; i += kThreads) {
      const int32_t q = i / Filter::kRows, row = i % Filter::kRows, c = channel(q);
      const T* const taps = c < in.channels ? weight + int64_t{c} * (kKernel * kKernel) : nullptr;
      Filter::write_row(taps, mirrored, row, filters + q * Filter::kBoth);
    }
    float* const starts = reinterpret_cast<float*>(tile + starts_at());
    for (int32_t q = thread; q < grid.planes(); q += kThreads) {
      const int32_t c = channel(q);
      starts[q] = bias && c < in.channels ? static_cast<float>(bias[c]) : 0;
    }
    if constexpr (!kChannelsLast) copies_arrived();
  }

  TORCHTP_HOST_DEVICE void bring_columns(int thread, int32_t block, T* tile) const {
    if (loads || in.columns_left + in.columns_right == 0) return;
    const Spot at = spot(block);
    stage_both_columns<kThreads>(in, shape, at.plane, num_planes(), at.tile.y0 - offset_y, at.tile.x0 - offset_x - lead,
                                 thread, tile);
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
    const T* const filter = tile + shape.numel() + task.plane * Filter::kBoth;
    if (grid.pieces == 4) {
      multiply_pieces<4>(lane, inputs, filter, state);
    } else if (grid.pieces == 2) {
      multiply_pieces<2>(lane, inputs, filter, state);
    } else {
      multiply_pieces<1>(lane, inputs, filter, state);
    }
  }

  template <int kPieces>
  TORCHTP_HOST_DEVICE void multiply_pieces(int lane, const T* inputs, const T* filter, State& state) const {
    const int g = row_of(lane), t2 = column_of(lane);
#ifdef __CUDA_ARCH__
    const T* row = inputs + lane % 16 * shape.pitch + lane / 16 * 8;
    const T* const right = Filter::pair(filter, t2 - g - lead);
#pragma unroll
    for (int ky = 0; ky < kKernel; ++ky, row += shape.pitch) {
      const uint32_t right0 = word_at(right + 16 * ky), right1 = word_at(right + 16 * ky + 8);
      uint32_t left[2 * kPieces + 2];
      load_four<false>(row, left[0], left[1], left[2], left[3]);
      if constexpr (kPieces == 4) load_four<false>(row + 16, left[4], left[5], left[6], left[7]);
      if constexpr (kPieces > 1) load_two<false>(row + 8 * kPieces, left[2 * kPieces], left[2 * kPieces + 1]);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        multiply_add<T>(state.sums[j], left[2 * j], left[2 * j + 1], left[2 * j + 2], left[2 * j + 3], right0, right1);
      }
    }
#else
    for (int j = 0; j < kPieces; ++j) {
      for (int i = 0; i < 4; ++i) {
        for (int ky = 0; ky < kKernel; ++ky) {
          for (int kx = 0; kx < kKernel; ++kx) {
            const T input = inputs[(g + i / 2 * 8 + ky) * shape.pitch + 8 * j + t2 + i % 2 + kx + lead];
            state.sums[j][i] += static_cast<float>(input) * static_cast<float>(filter[16 * (ky + 1) + kx]);
          }
        }
      }
    }
#endif
  }

  TORCHTP_HOST_DEVICE void lay(int lane, const State& state, int32_t pitch, T* to) const {
    T* const mine = to + row_of(lane) * pitch + column_of(lane);
    // Apart there is room for four pieces, whatever the last ones hold.
    if (!kChannelsLast || grid.pieces == 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) lay_piece(state.sums[j], pitch, mine + 8 * j);
    } else {
      lay_piece(state.sums[0], pitch, mine);
      if (grid.pieces == 2) lay_piece(state.sums[1], pitch, mine + 8);
    }
  }
  TORCHTP_HOST_DEVICE static void lay_piece(const float (&sums)[4], int32_t pitch, T* to) {
    set_word(to, paired<T>(sums[0], sums[1]));
    set_word(to + 8 * pitch, paired<T>(sums[2], sums[3]));
  }

  // Channels first: a warp's own task, lanes below each other.
  TORCHTP_HOST_DEVICE void take(int lane, const BandTask& task, int32_t block, const T* apart) const {
    const Spot at = spot(block);
    const Region& region = at.tile.region;
    const int64_t plane = at.plane + task.plane;
    const int32_t together = grid.pieces == 4 ? 8 : 16, chunk = grid.pieces == 4 ? lane / 8 : lane / 16;
    const int32_t row = lane & (together - 1), y = at.tile.y0 + 16 * task.strip + row;
    const int32_t x = at.tile.x0 + 8 * (grid.pieces * task.part + chunk);
    if (plane >= num_planes() || chunk >= grid.pieces || x >= region.x1 || x + 8 <= region.x0) return;
    const bool whole = stores && x >= region.x0 && x + 8 <= region.x1;
    T* to = out + (plane * out_height + y) * out_width + x;
    const T* from = apart + kPitchApart * row + 8 * chunk;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if ((i > 0 && together == 16) || y + 8 * i >= region.y1) return;
      const Chunk results = load_chunk(from + 8 * i * kPitchApart);
      T* const there = to + int64_t{8 * i} * out_width;
      if (whole) {
        store_chunk(results, there);
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          if (x + k >= region.x0 && x + k < region.x1) there[k] = number<T>(results, k);
        }
      }
    }
  }

  TORCHTP_HOST_DEVICE void take_all(int thread, int32_t block, const T* tile) const {
    const Spot at = spot(block);
    take_pixels<kThreads>(shape, tile, at.plane, at.channel, in.channels, out_height, out_width, grid.rows(),
                          at.tile.y0, at.tile.x0, at.tile.region, stores, thread, out);
  }
};

}  // namespace torchtp::kernels
