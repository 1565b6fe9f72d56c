#include "core/interval.h"

namespace torchtp {

Interval owned(int64_t extent, int64_t num_shards, int64_t shard) {
  const int64_t each = ceil_div(extent, num_shards);
  return {std::min(extent, shard * each), std::min(extent, (shard + 1) * each)};
}

int64_t output_extent(const Window& window, int64_t extent, bool ceil_mode) {
  const int64_t room = extent + 2 * window.padding - window.reach() - 1;
  if (room < 0 && !ceil_mode) return 0;
  int64_t count = (ceil_mode ? ceil_div(room, window.stride) : room / window.stride) + 1;
  if (ceil_mode && (count - 1) * window.stride >= extent + window.padding) --count;
  return std::max<int64_t>(count, 0);
}

int64_t transposed_extent(const Window& window, int64_t extent, int64_t output_padding) {
  return (extent - 1) * window.stride - 2 * window.padding + window.reach() + output_padding + 1;
}

Interval read_by(const Interval& outputs, const Window& window) {
  if (outputs.empty()) return {};
  return {window.stride * outputs.begin - window.padding,
          window.stride * (outputs.end - 1) - window.padding + window.reach() + 1};
}

Interval readers_of(const Interval& inputs, const Window& window) {
  if (inputs.empty()) return {};
  const int64_t begin = ceil_div(inputs.begin + window.padding - window.reach(), window.stride);
  return {begin, std::max(begin, floor_div(inputs.end - 1 + window.padding, window.stride) + 1)};
}

}  // namespace torchtp
