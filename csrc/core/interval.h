#pragma once

#include <algorithm>
#include <cstdint>

namespace torchtp {

// Rows or columns [begin, end) of one dim, in global coordinates.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end > begin ? end - begin : 0; }
  bool empty() const { return end <= begin; }
  bool contains(const Interval& other) const { return other.empty() || (begin <= other.begin && other.end <= end); }
  friend bool operator==(const Interval& a, const Interval& b) { return a.begin == b.begin && a.end == b.end; }
  friend bool operator!=(const Interval& a, const Interval& b) { return !(a == b); }
};

inline Interval intersect(const Interval& a, const Interval& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

inline Interval shift(const Interval& interval, int64_t by) { return {interval.begin - by, interval.end - by}; }

inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
inline int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

// What a shard owns of a dim of `extent`: torch.chunk's rule, ceil(extent / num_shards) each, the last ones shorter or
// empty.
Interval owned(int64_t extent, int64_t num_shards, int64_t shard);

// A window sliding along one dim.
struct Window {
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t dilation = 1;

  // Distance from the first to the last tap.
  int64_t reach() const { return dilation * (kernel - 1); }
};

// Number of positions of the window over `extent` (0 if it does not fit once). With `ceil_mode`, as pooling counts: a
// last window may overhang, unless it would start in the right padding.
int64_t output_extent(const Window& window, int64_t extent, bool ceil_mode = false);
// Extent of the transposed convolution's output.
int64_t transposed_extent(const Window& window, int64_t extent, int64_t output_padding);

// Inputs that the windows of `outputs` read; may overhang [0, extent) on both sides (padding).
Interval read_by(const Interval& outputs, const Window& window);
// Windows that read any of `inputs`; not clipped to the windows there are.
Interval readers_of(const Interval& inputs, const Window& window);

}  // namespace torchtp
