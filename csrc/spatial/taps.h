#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/interval.h"

namespace torchtp::spatial {

// Which input rows make each output row of a dim, and with what weights; all global.
struct Taps {
  static constexpr int64_t kNone = -1;

  int64_t each = 1;             // taps of one output row
  std::vector<int64_t> places;  // [output extent * each]; kNone where a row has fewer, at the end of its taps
  std::vector<double> weights;  // [output extent * each]

  // Input rows that some output row of `outputs` reads.
  Interval read_by(const Interval& outputs) const;
};

// The taps of ATen's upsample functions, or of their backward functions, for tensors of doubles (`wide`) or of narrower
// types; `scale` 0 means from the sizes. `small_image`: of images of two dims, of at most 128 output rows and columns
// together, and of four channels or more that come last, ATen's forward function rounds the nearest modes in float.
Taps make_taps(const std::string& mode, int64_t in_extent, int64_t out_extent, double scale, bool align_corners,
               bool wide, bool backward, bool small_image);

}  // namespace torchtp::spatial
