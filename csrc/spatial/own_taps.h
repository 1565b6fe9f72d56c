#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/interval.h"

namespace torchtp::spatial {

// One dim of a resampling, whole or cut over ranks. `mode`, `scale`, `wide` and `small_image` are those
// of make_taps.
struct Resampling {
  std::string mode;
  int64_t in_extent = 1, out_extent = 1;  // global
  double scale = 0;
  bool align_corners = false, wide = false, backward = false, small_image = false;
  bool either = false;     // a rank may take it for a small image where another one does not: frames are of both
  bool by_kernel = false;  // a nearest mode on a device, whose kernels round otherwise than ATen on the CPU
  int size = 0, rank = 0;  // of the group; a size of 0: not cut

  friend bool operator<(const Resampling& a, const Resampling& b) { return a.tie() < b.tie(); }

 private:
  std::tuple<const std::string&, const int64_t&, const int64_t&, const double&, const bool&, const bool&, const bool&,
             const bool&, const bool&, const bool&, const int&, const int&>
  tie() const {
    return std::tie(mode, in_extent, out_extent, scale, align_corners, wide, backward, small_image, either, by_kernel,
                    size, rank);
  }
};

// What a rank has to know of the taps of one dim.
struct OwnTaps {
  Interval outputs, frame;       // own rows of the output and the input rows they read
  std::vector<Interval> wanted;  // frames of all ranks, where the dim is cut
  int64_t each = 1;              // taps of one output row
  std::vector<int64_t> places;   // [outputs * each], from the frame's first row on
  std::vector<double> weights;   // [outputs * each]
  bool copies = false;           // every row is the input's
};

// Remembered: a step of training asks for the same ones again. Thread-safe.
std::shared_ptr<const OwnTaps> own_taps(const Resampling& resampling);

}  // namespace torchtp::spatial
