#include "spatial/taps.h"

#include <ATen/ops/_upsample_nearest_exact1d.h>
#include <ATen/ops/_upsample_nearest_exact1d_backward.h>
#include <ATen/ops/_upsample_nearest_exact2d.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/upsample_nearest1d.h>
#include <ATen/ops/upsample_nearest1d_backward.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace torchtp::spatial {
namespace {

// From one output row to the next, in input rows: places fit into 64 bits, however small the scale.
constexpr double kLargestStep = 1 << 30;

// ATen computes coordinates in the type it accumulates in.
template <typename T>
class Coordinates {
 public:
  Coordinates(int64_t in_extent, int64_t out_extent, double scale, bool align_corners) : align_corners_(align_corners) {
    if (align_corners) {
      step_ = out_extent > 1 ? static_cast<T>(in_extent - 1) / (out_extent - 1) : T(0);
    } else {
      step_ = scale > 0 ? static_cast<T>(std::min(1.0 / scale, kLargestStep)) : static_cast<T>(in_extent) / out_extent;
    }
  }
  T at(int64_t output, bool cubic) const {
    if (align_corners_) return step_ * output;
    const T place = step_ * (output + T(0.5)) - T(0.5);
    return !cubic && place < 0 ? T(0) : place;
  }
  T step() const { return step_; }

 private:
  bool align_corners_;
  T step_;
};

template <typename T>
Taps linear_taps(int64_t in_extent, int64_t out_extent, double scale, bool align_corners) {
  const Coordinates<T> coordinates(in_extent, out_extent, scale, align_corners);
  Taps taps{2, {}, {}};
  for (int64_t o = 0; o < out_extent; ++o) {
    const T place = coordinates.at(o, false);
    // Like ATen: an extent that stays is copied, whatever the scale says; no other row is read, which may be no number.
    const bool copied = in_extent == out_extent;
    const int64_t first = copied ? o : std::min(static_cast<int64_t>(std::floor(place)), in_extent - 1);
    const T weight = copied ? T(0) : std::min(std::max(place - first, T(0)), T(1));
    taps.places.insert(taps.places.end(), {first, copied ? first : std::min(first + 1, in_extent - 1)});
    taps.weights.insert(taps.weights.end(), {static_cast<double>(T(1) - weight), static_cast<double>(weight)});
  }
  return taps;
}

// Keys' kernel with A = -0.75.
template <typename T>
Taps cubic_taps(int64_t in_extent, int64_t out_extent, double scale, bool align_corners) {
  const Coordinates<T> coordinates(in_extent, out_extent, scale, align_corners);
  const T a = T(-0.75);
  const auto near = [a](T x) { return ((a + 2) * x - (a + 3)) * x * x + 1; };
  const auto far = [a](T x) { return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a; };
  Taps taps{4, {}, {}};
  for (int64_t o = 0; o < out_extent; ++o) {
    const T place = coordinates.at(o, true);
    const T floor = std::floor(place);
    const T t = std::min(std::max(place - floor, T(0)), T(1));
    const T weights[4] = {far(t + 1), near(t), near(1 - t), far(2 - t)};
    for (int64_t k = 0; k < 4; ++k) {
      taps.places.push_back(std::clamp<int64_t>(static_cast<int64_t>(floor) - 1 + k, 0, in_extent - 1));
      taps.weights.push_back(static_cast<double>(weights[k]));
    }
  }
  return taps;
}

// Antialiased: the filter, `radius` wide at either side, is stretched by the step where rows become fewer, and the
// weights of its taps sum to 1. Coordinates are rounded where ATen rounds them: the half is a double.
template <typename T, typename Filter>
Taps antialiased_taps(int64_t in_extent, int64_t out_extent, double scale, bool align_corners, T radius,
                      const Filter& filter) {
  const T step = Coordinates<T>(in_extent, out_extent, scale, align_corners).step();
  const T support = step >= 1 ? radius * step : radius, shrink = step >= 1 ? 1 / step : T(1);
  // No more than there are rows at either side: a scale of almost nothing needs no memory for what is not there.
  Taps taps{2 * std::min(static_cast<int64_t>(std::ceil(support)), in_extent) + 1, {}, {}};
  std::vector<T> weights;
  for (int64_t o = 0; o < out_extent; ++o) {
    const T center = static_cast<T>(step * (o + 0.5));
    const int64_t first = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
    const int64_t last = std::min({static_cast<int64_t>(center + support + 0.5), in_extent, first + taps.each});
    weights.clear();
    T sum = 0;
    for (int64_t row = first; row < last; ++row) {
      weights.push_back(filter(static_cast<T>((row - center + 0.5) * shrink)));
      sum += weights.back();
    }
    for (int64_t k = 0; k < taps.each; ++k) {
      const bool taken = first + k < last;
      taps.places.push_back(taken ? first + k : Taps::kNone);
      taps.weights.push_back(taken ? static_cast<double>(sum == 0 ? weights[k] : weights[k] / sum) : 0.0);
    }
  }
  return taps;
}

template <typename T>
Taps antialiased_taps(const std::string& mode, int64_t in_extent, int64_t out_extent, double scale,
                      bool align_corners) {
  if (mode == "linear-antialias") {
    return antialiased_taps<T>(in_extent, out_extent, scale, align_corners, T(1),
                               [](T x) { return std::max(1 - std::abs(x), T(0)); });
  }
  // Keys' kernel, here with A = -0.5.
  return antialiased_taps<T>(in_extent, out_extent, scale, align_corners, T(2), [](T x) {
    const T a = T(-0.5);
    x = std::abs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : T(0);
  });
}

// One tap an output row, the row itself.
Taps copying_taps(int64_t extent) {
  Taps taps{1, std::vector<int64_t>(extent), std::vector<double>(extent, 1.0)};
  std::iota(taps.places.begin(), taps.places.end(), 0);
  return taps;
}

// Rounding decides which row is nearest, and ATen rounds otherwise in backward than in forward, so ATen itself is
// asked. Forward it resamples the row numbers, for small images as one of them, which it rounds otherwise again; four
// channels, channels last, are resampled as a small image whatever their size.
// Backward it adds ones: as many as a row gets of them, so many outputs in turn are nearest to it.
Taps nearest_taps(bool exact, int64_t in_extent, int64_t out_extent, double scale, bool wide, bool backward,
                  bool small_image) {
  const auto type = wide || in_extent >= (1 << 24) ? at::kDouble : at::kFloat;
  const auto options = at::TensorOptions().dtype(type);
  const auto given = scale > 0 ? std::optional<double>(std::max(scale, 1 / kLargestStep)) : std::nullopt;
  at::Tensor nearest;
  if (backward) {
    const at::Tensor ones = at::ones({1, 1, out_extent}, options);
    const std::vector<int64_t> sizes{1, 1, in_extent};
    const at::Tensor counts = exact ? at::_upsample_nearest_exact1d_backward(ones, {out_extent}, sizes, given)
                                    : at::upsample_nearest1d_backward(ones, {out_extent}, sizes, given);
    nearest = at::repeat_interleave(counts.view({in_extent}).to(at::kLong));
  } else if (small_image) {
    const at::Tensor rows = at::arange(in_extent, options).view({1, 1, 1, in_extent}).expand({1, 4, 1, in_extent});
    const at::Tensor image = rows.contiguous(at::MemoryFormat::ChannelsLast);
    const std::vector<int64_t> sizes{1, out_extent};
    nearest = exact ? at::_upsample_nearest_exact2d(image, sizes, std::nullopt, given)
                    : at::upsample_nearest2d(image, sizes, std::nullopt, given);
    nearest = nearest.select(1, 0);
  } else {
    const at::Tensor rows = at::arange(in_extent, options).view({1, 1, in_extent});
    nearest = exact ? at::_upsample_nearest_exact1d(rows, {out_extent}, given)
                    : at::upsample_nearest1d(rows, {out_extent}, given);
  }
  nearest = nearest.to(at::kLong).contiguous();
  TORCH_INTERNAL_ASSERT(nearest.numel() == out_extent);
  const int64_t* const places = nearest.data_ptr<int64_t>();
  return {1, {places, places + out_extent}, std::vector<double>(out_extent, 1.0)};
}

}  // namespace

Interval Taps::read_by(const Interval& outputs) const {
  Interval range;
  for (int64_t i = outputs.begin * each; i < outputs.end * each; ++i) {
    const int64_t place = places[i];
    if (place == kNone) continue;
    range = range.empty() ? Interval{place, place + 1}
                          : Interval{std::min(range.begin, place), std::max(range.end, place + 1)};
  }
  return range;
}

Taps make_taps(const std::string& mode, int64_t in_extent, int64_t out_extent, double scale, bool align_corners,
               bool wide, bool backward, bool small_image) {
  if (mode == "nearest" || mode == "nearest-exact") {
    return nearest_taps(mode == "nearest-exact", in_extent, out_extent, scale, wide, backward, small_image);
  }
  if (mode == "linear") {
    return wide ? linear_taps<double>(in_extent, out_extent, scale, align_corners)
                : linear_taps<float>(in_extent, out_extent, scale, align_corners);
  }
  if (mode == "linear-antialias" || mode == "cubic-antialias") {
    // Like ATen: forward an extent that stays is copied, whatever the scale says; backward the scale is followed.
    if (in_extent == out_extent && !backward) return copying_taps(in_extent);
    return wide ? antialiased_taps<double>(mode, in_extent, out_extent, scale, align_corners)
                : antialiased_taps<float>(mode, in_extent, out_extent, scale, align_corners);
  }
  TORCH_CHECK_VALUE(mode == "cubic",
                    "interpolate: mode is nearest, nearest-exact, linear, cubic, linear-antialias or cubic-antialias, "
                    "not '",
                    mode, "'");
  return wide ? cubic_taps<double>(in_extent, out_extent, scale, align_corners)
              : cubic_taps<float>(in_extent, out_extent, scale, align_corners);
}

}  // namespace torchtp::spatial
