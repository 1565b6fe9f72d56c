#pragma once

#include "kernels/block_program.h"
#include "kernels/depthwise_layer_norm.h"
#include "kernels/depthwise_stage.h"
#include "kernels/layer_norm.h"
#include "kernels/vectors.h"

namespace torchtp::kernels {

// The shared memory of a block, in bytes: the window of kLanes channels and their filters in float, and what the
// convolution has given of all channels, as T, position by position.
struct DepthwiseLayerNormMemory {
  int32_t rows, columns;  // of the tile of outputs
  int32_t kernel_y, kernel_x, channels;
  int64_t element_bytes;
  bool channels_last;

  TORCHTP_HOST_DEVICE int32_t window_rows() const { return rows + kernel_y - 1; }
  TORCHTP_HOST_DEVICE int32_t window_columns() const { return columns + kernel_x - 1; }
  TORCHTP_HOST_DEVICE int32_t window_floats() const {
    return round_to_fours(window_rows() * window_columns() * (channels_last ? kLanes : kSpacedLanes));
  }
  // From one channel's filter to the next one's; odd, so that the lanes of a warp meet different banks.
  TORCHTP_HOST_DEVICE int32_t filter_pitch() const { return kernel_y * kernel_x | 1; }
  TORCHTP_HOST_DEVICE int32_t filter_floats() const { return kLanes * filter_pitch(); }
  // From one position to the next one, in elements: whole loads of 16 bytes, or an odd number of 4 bytes, as the lanes
  // of a warp read one channel of neighbouring positions.
  TORCHTP_HOST_DEVICE int32_t held_pitch() const {
    const auto wide = static_cast<int32_t>((channels_last ? 16 : 4) / element_bytes);
    const int32_t loads = (channels + wide - 1) / wide;
    return (channels_last ? loads : loads | 1) * wide;
  }
  size_t bytes() const {
    return sizeof(float) * (size_t(window_floats()) + filter_floats()) +
           size_t(rows) * columns * held_pitch() * element_bytes;
  }
};

// A block takes a tile of positions, and step after step 32 of their channels: the window comes into shared memory, and
// a warp's lanes convolve a channel each, 4 x 4 outputs a thread. What they give stays in shared memory, as T, and is
// normed from there once all channels have passed: neighbouring threads take what lies side by side in memory, channels
// or positions. kKernel: known to the compiler, the filter then in registers; or 0.
template <typename T, int kKernel, bool kChannelsLast>
struct DepthwiseLayerNorm {
  static constexpr int kThreads = 256, kBlocksPerSm = 2;
  static constexpr int kStepPhases = 2, kPhases = 5;
  static constexpr int kRows = 4, kColumns = 4, kLogSpots = 3;
  // Threads that norm a position together; positions that each norms.
  static constexpr int kShare = 8, kTeams = kThreads / kShare;
  static constexpr int team = kChannelsLast ? kShare : kThreads, apart = kChannelsLast ? 1 : kTeams;
  static constexpr int kEach = (kRows * kColumns << kLogSpots) / kTeams;
  static constexpr int kWide = kChannelsLast ? 16 / sizeof(T) : 1;
  static constexpr int kPixel = kChannelsLast ? kLanes : kSpacedLanes;  // floats of the window
  // With which two blocks share a multiprocessor of sm_90. Channels first long rows, of whole sectors, count for more.
  static constexpr size_t kGoodShared = kChannelsLast ? 112 * 1024 : kMostSharedBytes;
  struct State {
    Vector<kEach> partial, mean;
  };

  HaloPlanes<T> in;
  DepthwiseLayerNormArgs<T> args;
  DepthwiseParams params;
  bool wide;  // channels go by 16 bytes
  TileGrid grid;
  StageShape stage;

  static DepthwiseLayerNorm make(const HaloPlanes<T>& in, const DepthwiseLayerNormArgs<T>& args,
                                 const DepthwiseParams& params, const Regions& regions, size_t most_shared) {
    const T *const out = args.out, *const convolved = args.convolved;
    DepthwiseLayerNorm program{in, args, params, aligned(params.channels, kWide, {out, convolved}), {}, {}};
    program.grid = tile_grid(kLogSpots, 0, false, kRows, kColumns, kChannelsLast ? 2 : 3, regions);
    const size_t good = most_shared < kGoodShared ? most_shared : kGoodShared;
    TileGrid& grid = program.grid;
    // Down to two threads' tiles, which depthwise_layer_norm_fits promises.
    while (program.shared_bytes() > good && grid.log_x + grid.log_y > 1) shrink(grid, false);
    const DepthwiseLayerNormMemory memory = program.memory();
    const int64_t innermost = kChannelsLast ? in.channels : in.width;
    program.stage = stage_shape(kLanes, memory.window_rows(), memory.window_columns(), 0, loads_four(in, innermost));
    return program;
  }

  TORCHTP_HOST_DEVICE DepthwiseLayerNormMemory memory() const {
    return {grid.rows(), grid.columns(), kernel_y(), kernel_x(), params.channels, sizeof(T), kChannelsLast};
  }
  size_t shared_bytes() const { return memory().bytes(); }
  int64_t num_blocks() const { return params.batches * grid.tiles(); }
  TORCHTP_HOST_DEVICE int num_steps(int64_t) const { return (params.channels + kLanes - 1) / kLanes; }
  static constexpr bool reduces(int phase) { return phase == 2 || phase == 3; }
  static TORCHTP_HOST_DEVICE Vector<kEach> combine(const Vector<kEach>& low, const Vector<kEach>& high) {
    return low + high;
  }

  template <int kPhase>
  TORCHTP_HOST_DEVICE void run(const Place& place, int step, State& state, void* shared) const {
    const auto block = static_cast<int32_t>(place.block), group = grid.all.quotient(block);
    const Region tile = grid.tile(block - group * grid.all.divisor);
    const int64_t n = group;
    const DepthwiseLayerNormMemory parts = memory();
    float* const window = static_cast<float*>(shared);
    float* const filters = window + parts.window_floats();
    T* const held = reinterpret_cast<T*>(filters + parts.filter_floats());
    if constexpr (kPhase == 0) {
      bring(place.thread, n, step * kLanes, tile, window, filters);
    } else if constexpr (kPhase == 1) {
      convolve(place.thread, step * kLanes, window, filters, held);
    } else if (kWide > 1 && wide) {
      norm<kPhase, kWide>(place.thread, n, tile, held, state);
    } else {
      norm<kPhase, 1>(place.thread, n, tile, held, state);
    }
  }

 private:
  TORCHTP_HOST_DEVICE int32_t kernel_y() const { return kKernel ? kKernel : params.y.kernel; }
  TORCHTP_HOST_DEVICE int32_t kernel_x() const { return kKernel ? kKernel : params.x.kernel; }

  TORCHTP_HOST_DEVICE void bring(int thread, int64_t n, int32_t c0, const Region& tile, float* window,
                                 float* filters) const {
    const int32_t taps = kernel_y() * kernel_x(), pitch = memory().filter_pitch();
    for (int32_t i = thread; i < kLanes * taps; i += kThreads) {
      const int32_t q = i / taps, tap = i - q * taps;
      filters[q * pitch + tap] =
          c0 + q < params.channels ? static_cast<float>(args.weight[int64_t{c0 + q} * taps + tap]) : 0;
    }
    const int32_t y0 = tile.y0 - params.y.offset, x0 = tile.x0 - params.x.offset;
    if constexpr (kChannelsLast) {
      stage_interleaved<kThreads>(in, stage, n, c0, y0, x0, thread, window);
    } else {
      stage_interleaved_from_first<kThreads>(in, stage, n, c0, y0, x0, thread, window);
    }
  }

  // All of the tile, so that nothing of it is left as it was; the norm leaves out what is not of the region.
  TORCHTP_HOST_DEVICE void convolve(int thread, int32_t c0, const float* window, const float* filters, T* held) const {
    const int32_t q = thread % kLanes, spot = thread / kLanes, c = c0 + q;
    const int32_t tx = spot & ((1 << grid.log_x) - 1), ty = spot >> grid.log_x;
    if (ty >> grid.log_y > 0 || c >= params.channels) return;
    const float start = args.bias ? static_cast<float>(args.bias[c]) : 0.0f;
    float sums[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[r][j] = start;
    }
    const int32_t row_floats = stage.columns * kPixel;
    const float* const from = window + ty * kRows * row_floats + tx * kColumns * kPixel + q;
    const float* const filter = filters + q * memory().filter_pitch();
    if constexpr (kKernel > 0) {
      take_known(from, row_floats, filter, sums);
    } else {
      take_any(from, row_floats, filter, sums);
    }
    const int32_t pitch = memory().held_pitch();
    T* const to = held + (ty * kRows * grid.columns() + tx * kColumns) * pitch + c;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) to[(r * grid.columns() + j) * pitch] = static_cast<T>(sums[r][j]);
    }
  }

  // Each row of the window meets every output row it belongs to.
  static TORCHTP_HOST_DEVICE void take_known(const float* from, int32_t row_floats, const float* filters,
                                             float (&sums)[kRows][kColumns]) {
    float filter[kKernel * kKernel];
#pragma unroll
    for (int i = 0; i < kKernel * kKernel; ++i) filter[i] = filters[i];
#pragma unroll
    for (int v = 0; v < kRows - 1 + kKernel; ++v, from += row_floats) {
      float row[kColumns - 1 + kKernel];
      read_row<kColumns - 1 + kKernel, true, kPixel>(from, row);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int ky = v - r;
        if (ky < 0 || ky >= kKernel) continue;
#pragma unroll
        for (int kx = 0; kx < kKernel; ++kx) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) sums[r][j] += row[j + kx] * filter[ky * kKernel + kx];
        }
      }
    }
  }

  // A tap for all outputs: one load of the filter and kRows of the window for kRows * kColumns FMA.
  TORCHTP_HOST_DEVICE void take_any(const float* from, int32_t row_floats, const float* filter,
                                    float (&sums)[kRows][kColumns]) const {
    for (int32_t ky = 0; ky < params.y.kernel; ++ky, from += row_floats) {
      float row[kRows][kColumns];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 1; j < kColumns; ++j) row[r][j] = from[r * row_floats + (j - 1) * kPixel];
      }
#pragma unroll 4
      for (int32_t kx = 0; kx < params.x.kernel; ++kx) {
        const float tap = *filter++;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int j = 0; j + 1 < kColumns; ++j) row[r][j] = row[r][j + 1];
          row[r][kColumns - 1] = from[r * row_floats + (kx + kColumns - 1) * kPixel];
#pragma unroll
          for (int j = 0; j < kColumns; ++j) sums[r][j] += row[r][j] * tap;
        }
      }
    }
  }

  // This thread's place among those that norm its positions.
  TORCHTP_HOST_DEVICE static int place_in_team(int thread) { return kChannelsLast ? thread % kShare : thread / kTeams; }
  // Its positions: numbers in the tile (those from the end of the tile on are none), and in the output; negative
  // outside the region.
  TORCHTP_HOST_DEVICE static int32_t spot(int thread, int i) {
    return (kChannelsLast ? thread / kShare : thread % kTeams) + i * kTeams;
  }
  TORCHTP_HOST_DEVICE int64_t position(int32_t spot, int64_t n, const Region& tile) const {
    const int32_t y = tile.y0 + spot / grid.columns(), x = tile.x0 + spot % grid.columns();
    return y < tile.y1 && x < tile.x1 ? (n * params.out_height + y) * params.out_width + x : -1;
  }
  // Of channel c there.
  TORCHTP_HOST_DEVICE int64_t element(int64_t position, int64_t n, int32_t c) const {
    if constexpr (kChannelsLast) return position * params.channels + c;
    return position + (n * (params.channels - 1) + c) * params.out_height * params.out_width;
  }

  // The sum and where it is wanted the copy, the squares, the result; kVector neighbouring channels at once.
  template <int kPhase, int kVector>
  TORCHTP_HOST_DEVICE void norm(int thread, int64_t n, const Region& tile, const T* held, State& state) const {
    using Elements = Pack<T, kVector>;
    const int32_t spots = grid.rows() * grid.columns(), pitch = memory().held_pitch();
    const float each = 1.0f / static_cast<float>(params.channels);
    int64_t at[kEach];
    Vector<kEach> sums{}, factors{};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      at[i] = spot(thread, i) < spots ? position(spot(thread, i), n, tile) : -1;
      if constexpr (kPhase == 3) state.mean.values[i] = state.partial.values[i] * each;
      if constexpr (kPhase == 4) {
        factors.values[i] = layer_norm_rstd(state.partial.values[i] * each, args.eps);
        if (at[i] < 0 || place_in_team(thread) != 0) continue;
        args.mean[at[i]] = state.mean.values[i];
        args.rstd[at[i]] = factors.values[i];
      }
    }
    for (int32_t c = place_in_team(thread) * kVector; c < params.channels; c += kShare * kVector) {
      float weight[kVector], bias[kVector];
      if constexpr (kPhase == 4) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          weight[k] = args.norm_weight ? args.norm_weight[c + k] : 1.0f;
          bias[k] = args.norm_bias ? args.norm_bias[c + k] : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (at[i] < 0) continue;
        const int64_t to = element(at[i], n, c);
        Elements elements = *reinterpret_cast<const Elements*>(held + spot(thread, i) * pitch + c);
        if (kPhase == 2 && args.convolved) *reinterpret_cast<Elements*>(args.convolved + to) = elements;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float value = static_cast<float>(elements.values[k]);
          if constexpr (kPhase == 2) {
            sums.values[i] += value;
          } else if constexpr (kPhase == 3) {
            const float off = value - state.mean.values[i];
            sums.values[i] += off * off;
          } else {
            elements.values[k] =
                static_cast<T>(layer_norm_apply(value, state.mean.values[i], factors.values[i], weight[k], bias[k]));
          }
        }
        if constexpr (kPhase == 4) *reinterpret_cast<Elements*>(args.out + to) = elements;
      }
    }
    if constexpr (kPhase < 4) state.partial = sums;
  }
};

}  // namespace torchtp::kernels
