#pragma once

#include <type_traits>

#include "kernels/block_program.h"
#include "kernels/depthwise.h"
#include "kernels/depthwise_meeting.h"
#include "kernels/depthwise_stage.h"

namespace torchtp::kernels {

// Kernel and stride known to the compiler, any dilation at a stride of 1, else none; a convolution, or (kInputGrad) the
// gradient of its input, whose `in` is the gradient of the output and whose `out` that of the input. A thread keeps its
// channel's filter and kRows x kColumns outputs in registers; each row of the window that it reads from shared memory
// meets every output row it belongs to. At a stride of 1 the gradient is a convolution too, with the taps mirrored.
template <typename T, int kKernel, int kStride, bool kInputGrad, bool kChannelsLast>
struct DepthwiseTile : NoTeams {
  using Meeting = std::conditional_t<kInputGrad, GradMeeting<kKernel, kStride>, ForwardMeeting<kKernel, kStride>>;
  static constexpr int kThreads = kChannelsLast ? 256 : 128;
  static constexpr int kBlocksPerSm = 512 / kThreads;
  static constexpr int kStepPhases = 2, kPhases = 2;
  static constexpr int kRows = 8 / kStride, kColumns = kInputGrad ? 4 * kStride : 4;
  static constexpr int kTaps = kKernel * kKernel, kSlots = Meeting::kSlots, kFilter = kSlots * kSlots;
  static constexpr int kWindow = Meeting::rows(kColumns), kWindowRows = Meeting::rows(kRows);
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
  Divider chunks, channels;  // of channels, as a block has lanes, where they come last

  static DepthwiseTile make(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out,
                            const DepthwiseParams& params, const Regions& regions, bool mirrored, size_t most_shared) {
    // Channels last: a tile is 16 columns wide, and 16 rows high at a stride of 1.
    const Steps steps{params.y.dilation, params.x.dilation};
    TileGrid grid = kChannelsLast ? tile_grid(8, 5, false, kRows, kColumns, kColumns == 4 ? 2 : 1, regions, steps)
                                  : tile_grid(7, 0, true, kRows, kColumns, kColumns == 4 ? 4 : 3, regions, steps);
    const int64_t innermost_in = kChannelsLast ? in.channels : in.width;
    const bool loads = loads_four(in, innermost_in);
    const bool stores = !kChannelsLast && steps.x == 1 && loads_four(out, params.out_width);
    for (;;) {
      const int32_t rows = Meeting::rows(grid.rows()), columns = Meeting::rows(grid.columns());
      const int32_t pitch = Meeting::skipped(grid.columns() - kColumns) + round_to_fours(kWindow);
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
                                  stage_shape(grid.planes(), rows, columns, pitch, loads, steps),
                                  Divider((in.channels + kLanes - 1) / kLanes),
                                  Divider(in.channels)};
      if (program.shared_bytes() <= most_shared || !shrink(grid, !kChannelsLast)) return program;
    }
  }

  TORCHTP_HOST_DEVICE int64_t num_planes() const { return batches * in.channels; }
  int64_t num_blocks() const {
    const int64_t groups =
        kChannelsLast ? batches * chunks.divisor : (num_planes() + grid.planes() - 1) >> grid.log_planes;
    return groups * grid.tiles();
  }
  TORCHTP_HOST_DEVICE int32_t tile_floats() const {
    return kChannelsLast ? stage.interleaved_floats() : stage.planar_floats();
  }
  size_t shared_bytes() const { return sizeof(float) * (tile_floats() + grid.planes() * kFilter); }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return 1; }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int, State&, void* shared) const {
    const auto block = static_cast<int32_t>(place.block), group = grid.all.quotient(block);
    const Region tile = grid.tile(block - group * grid.all.divisor);
    float* const memory = static_cast<float*>(shared);
    if constexpr (kPhase == 0) {
      bring(place.thread, group, tile, memory);
    } else {
      convolve(place.thread, group, tile, memory);
    }
  }

 private:
  // Channels last: the first channel of the block, and its batch.
  TORCHTP_HOST_DEVICE int32_t first_channel(int32_t group) const { return chunks.rest(group) * kLanes; }
  TORCHTP_HOST_DEVICE int64_t batch(int32_t group) const { return chunks.quotient(group); }

  TORCHTP_HOST_DEVICE void bring(int thread, int32_t group, const Region& tile, float* memory) const {
    const int32_t y0 = Meeting::first_row(tile.y0, offset_y), x0 = Meeting::first_row(tile.x0, offset_x);
    float* const filters = memory + tile_floats();
    const int64_t first_plane = int64_t{group} << grid.log_planes;
    for (int32_t i = thread; i < grid.planes() * kFilter; i += kThreads) {
      const int32_t q = i / kFilter, slot = i % kFilter;
      const int32_t ky = Meeting::tap(slot / kSlots, tile.y0, offset_y);
      const int32_t kx = Meeting::tap(slot % kSlots, tile.x0, offset_x);
      const int64_t plane = kChannelsLast ? first_channel(group) + q : first_plane + q;
      const int32_t c = kChannelsLast ? first_channel(group) + q : channels.rest(static_cast<int32_t>(plane));
      bool there = plane < (kChannelsLast ? int64_t{in.channels} : num_planes());
      if (kInputGrad) there = there && ky >= 0 && ky < kKernel && kx >= 0 && kx < kKernel;
      const int32_t tap = mirrored ? kTaps - 1 - (ky * kKernel + kx) : ky * kKernel + kx;
      filters[i] = there ? static_cast<float>(weight[int64_t{c} * kTaps + tap]) : 0;
    }
    if constexpr (kChannelsLast) {
      stage_interleaved<kThreads>(in, stage, batch(group), first_channel(group), y0, x0, thread, memory);
    } else {
      stage_planar<kThreads>(in, stage, first_plane, num_planes(), y0, x0, thread, memory);
    }
  }

  TORCHTP_HOST_DEVICE void convolve(int thread, int32_t group, const Region& tile, const float* memory) const {
    const int32_t q = kChannelsLast ? thread % kLanes : thread >> (grid.log_x + grid.log_y);
    const int32_t spot = kChannelsLast ? thread / kLanes : thread;
    if (spot >> (grid.log_x + grid.log_y) >= (kChannelsLast ? 1 : grid.planes())) return;
    const int32_t tx = spot & ((1 << grid.log_x) - 1), ty = (spot >> grid.log_x) & ((1 << grid.log_y) - 1);
    const Steps steps = kStride == 1 ? grid.steps : Steps{};
    const int32_t y = tile.y0 + ty * kRows * steps.y, x = tile.x0 + tx * kColumns * steps.x;
    const int64_t plane = kChannelsLast ? batch(group) : (int64_t{group} << grid.log_planes) + q;
    const int32_t c = kChannelsLast ? first_channel(group) + q : channels.rest(static_cast<int32_t>(plane));
    if (y >= tile.y1 || x >= tile.x1 || (kChannelsLast ? c >= in.channels : plane >= num_planes())) return;

    float filter[kFilter];
    const float* const filters = memory + tile_floats() + q * kFilter;
#pragma unroll
    for (int i = 0; i < kFilter; ++i) filter[i] = filters[i];
    const float start = bias ? static_cast<float>(bias[c]) : 0.0f;
    float sums[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[r][j] = start;
    }

    const int32_t row_floats = kChannelsLast ? stage.columns * kLanes : stage.pitch;
    const int32_t row = Meeting::skipped(ty * kRows), column = Meeting::skipped(tx * kColumns);
    const float* from = kChannelsLast ? memory + (row * stage.columns + column) * kLanes + q
                                      : memory + (q * stage.rows + row) * stage.pitch + column;
#pragma unroll
    for (int v = 0; v < kWindowRows; ++v, from += row_floats) {
      float window[kWindow];
      read_row<kWindow, kChannelsLast>(from, window);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int ky = Meeting::slot(r, v);
        if (ky < 0) continue;
#pragma unroll
        for (int u = 0; u < kWindow; ++u) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const int kx = Meeting::slot(j, u);
            if (kx >= 0) sums[r][j] += window[u] * filter[ky * kSlots + kx];
          }
        }
      }
    }

    // One of the two extents is what `own_index` of an output needs, but `in` has the input's.
    const int64_t pixel = (plane * out_height + y) * out_width + x;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (y + r * steps.y >= tile.y1) return;
      const int64_t first = pixel + int64_t{r * steps.y} * out_width;
#pragma unroll
      for (int j = 0; j < kColumns; j += 4) {
        if (stores_four && x % 4 == 0 && x + j + 4 <= tile.x1) {
          Pack<T, 4> four;
#pragma unroll
          for (int i = 0; i < 4; ++i) four.values[i] = static_cast<T>(sums[r][j + i]);
          *reinterpret_cast<Pack<T, 4>*>(out + first + j) = four;
        } else {
#pragma unroll
          for (int i = j; i < j + 4; ++i) {
            const int32_t right = i * steps.x;
            if (x + right < tile.x1) {
              out[kChannelsLast ? (first + right) * in.channels + c : first + right] = static_cast<T>(sums[r][i]);
            }
          }
        }
      }
    }
  }
};

}  // namespace torchtp::kernels
