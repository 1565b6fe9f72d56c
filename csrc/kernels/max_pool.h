#pragma once

#include <cstdint>
#include <limits>

#include "core/host_device.h"

namespace torchtp::kernels {

// Flat indices of a plane of up to three dims (leading ones 1) that is a frame of rows of a larger, global plane.
struct PoolIndex {
  int64_t frame[3], global[3];  // extents
  int64_t begin[3];             // global coordinate of the frame's first row; negative: padding lies in the frame
  int64_t dilation[3];

  // Where PyTorch says the maximum is. A window of nothing but -inf answers with its first tap, which must not be
  // padding. Int holds the indices it divides: two divisions of 64 bits take as long as the pooling itself.
  template <typename Int>
  TORCHTP_HOST_DEVICE int64_t to_global(int64_t index) const {
    const Int place = static_cast<Int>(index), rows = static_cast<Int>(frame[1]), columns = static_cast<Int>(frame[2]);
    const Int rest = place / columns;
    const int64_t at[3] = {static_cast<int64_t>(rest / rows), static_cast<int64_t>(rest % rows),
                           static_cast<int64_t>(place % columns)};
    int64_t out = 0;
    for (int i = 0; i < 3; ++i) {
      int64_t x = at[i] + begin[i];
      if (x < 0) x += (-x + dilation[i] - 1) / dilation[i] * dilation[i];
      out = out * global[i] + x;
    }
    return out;
  }

  template <typename Int>
  TORCHTP_HOST_DEVICE int64_t to_frame(int64_t index) const {
    const Int place = static_cast<Int>(index), rows = static_cast<Int>(global[1]),
              columns = static_cast<Int>(global[2]);
    const Int rest = place / columns;
    const int64_t at[3] = {static_cast<int64_t>(rest / rows) - begin[0], static_cast<int64_t>(rest % rows) - begin[1],
                           static_cast<int64_t>(place % columns) - begin[2]};
    return (at[0] * frame[1] + at[1]) * frame[2] + at[2];
  }
};

// Window o of a dim begins at row o * stride - padding of the frame; what it skips from row to row is PoolIndex's.
struct PoolWindows {
  int64_t outputs[3], kernel[3], stride[3], padding[3];
};

// `batches` times `channels` planes of `outputs` windows over planes of `inputs` elements (the frame). Channels lie
// innermost or planes do.
struct MaxPoolParams {
  int64_t batches, channels, outputs, inputs;
  bool channels_last;
  PoolIndex index;
  PoolWindows windows;

  // Whether the place in the frame of an index is in memory: one comparison, which costs nothing beside the divisions.
  template <typename Int>
  bool reaches(int64_t global, int64_t place) const {
    auto bits = static_cast<uint64_t>(place);
    if constexpr (sizeof(Int) < sizeof(global)) bits |= static_cast<uint64_t>(global) >> 32 << 32;  // which Int lacks
    return bits < static_cast<uint64_t>(inputs);
  }
};

// Calls f with a value of the narrowest type that holds the indices of a plane of those extents.
template <typename F>
void with_index_type(const int64_t (&extents)[3], const F& f) {
  if (static_cast<double>(extents[0]) * extents[1] * extents[2] <= std::numeric_limits<uint32_t>::max()) {
    f(uint32_t{});
  } else {
    f(int64_t{});
  }
}

// Work is cut over all planes, batches * channels of them; each call does planes [begin, end).
// indices[i] = to_global(indices[i]) for i in [begin, end).
void max_pool_to_global_cpu(int64_t* indices, const PoolIndex& index, int64_t begin, int64_t end);
// These two skip indices that lead out of the frame's memory, and return where one is, or -1.
// grad_frame (zeros) += grad_output at indices (global). Accumulates in A.
template <typename T, typename A>
int64_t max_pool_scatter_cpu(const T* grad_output, const int64_t* indices, A* grad_frame, const MaxPoolParams& params,
                             int64_t begin, int64_t end);
// out = frame at indices (global).
template <typename T>
int64_t max_pool_gather_cpu(const T* frame, const int64_t* indices, T* out, const MaxPoolParams& params, int64_t begin,
                            int64_t end);

}  // namespace torchtp::kernels
