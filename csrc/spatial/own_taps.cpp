#include "spatial/own_taps.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/interpolate_axis.h"
#include "spatial/taps.h"

namespace torchtp::spatial {
namespace {

constexpr size_t kMaxRemembered = 4 << 20;  // taps, 16 bytes each

// The rows that kernels will read: frames that ATen on the CPU rounds may lack one of them.
Taps taps_of_kernel(const Resampling& dim) {
  const auto axis = kernels::resample_axis(dim.mode, dim.in_extent, dim.out_extent, dim.scale, dim.align_corners);
  Taps taps{1, {}, std::vector<double>(dim.out_extent, 1.0)};
  for (int32_t o = 0; o < axis.out_extent; ++o) taps.places.push_back(axis.taps_of(o).first);
  return taps;
}

OwnTaps make_own_taps(const Resampling& dim) {
  const auto taps_of = [&](bool small_image) {
    if (dim.by_kernel) return taps_of_kernel(dim);
    return make_taps(dim.mode, dim.in_extent, dim.out_extent, dim.scale, dim.align_corners, dim.wide, dim.backward,
                     small_image);
  };
  const Taps taps = taps_of(dim.small_image), other = dim.either ? taps_of(!dim.small_image) : taps;
  OwnTaps own;
  own.each = taps.each;
  own.outputs = {0, dim.out_extent};
  own.frame = {0, dim.in_extent};
  for (int rank = 0; rank < dim.size; ++rank) {
    const Interval outputs = owned(dim.out_extent, dim.size, rank);
    const Interval one = taps.read_by(outputs), another = other.read_by(outputs);
    own.wanted.push_back({std::min(one.begin, another.begin), std::max(one.end, another.end)});
  }
  if (dim.size > 0) {
    own.outputs = owned(dim.out_extent, dim.size, dim.rank);
    own.frame = own.wanted[dim.rank];
  }
  const int64_t first = own.outputs.begin * taps.each, last = own.outputs.end * taps.each;
  own.places.assign(taps.places.begin() + first, taps.places.begin() + last);
  own.weights.assign(taps.weights.begin() + first, taps.weights.begin() + last);
  for (int64_t& place : own.places) {
    if (place != Taps::kNone) place -= own.frame.begin;
  }
  // An extent that stays may still be resampled: a given scale moves the taps of the nearest modes.
  own.copies = dim.size == 0 && dim.in_extent == dim.out_extent && taps.each == 1;
  for (int64_t row = 0; own.copies && row < dim.in_extent; ++row) own.copies = own.places[row] == row;
  return own;
}

class Memory {
 public:
  std::shared_ptr<const OwnTaps> get(const Resampling& resampling) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = entries_.find(resampling);
      if (found != entries_.end()) return found->second;
    }
    // Unlocked: the taps of the nearest modes come from ATen, which may run other threads.
    const auto own = std::make_shared<const OwnTaps>(make_own_taps(resampling));
    std::lock_guard<std::mutex> lock(mutex_);
    // A size that never comes back, as in multi-scale training, must not pile up.
    if (num_taps_ + own->places.size() > kMaxRemembered) {
      entries_.clear();
      num_taps_ = 0;
    }
    if (own->places.size() <= kMaxRemembered && entries_.emplace(resampling, own).second) {
      num_taps_ += own->places.size();
    }
    return own;
  }

 private:
  std::mutex mutex_;
  std::map<Resampling, std::shared_ptr<const OwnTaps>> entries_;
  size_t num_taps_ = 0;
};

}  // namespace

std::shared_ptr<const OwnTaps> own_taps(const Resampling& resampling) {
  static Memory memory;
  return memory.get(resampling);
}

}  // namespace torchtp::spatial
