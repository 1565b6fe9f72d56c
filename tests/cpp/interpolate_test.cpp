#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <limits>

#include "check.h"
#include "close.h"
#include "core/interval.h"
#include "kernels/interpolate_planes.h"
#include "kernels/run_on_host.h"

using namespace torchtp;
using kernels::ResampleAxis;
using kernels::Resampling;

namespace {

struct Mode {
  Resampling mode;
  bool align_corners;
  double scale;
};

// weights[o][i] with which output row o reads input row i, written without taps: the shape of the filter at the
// distance between the two rows, the last row of either end standing for all beyond it.
std::vector<std::vector<double>> matrix(const Mode& mode, int64_t in, int64_t out) {
  std::vector<std::vector<double>> weights(out, std::vector<double>(in));
  const double step = mode.scale > 0 ? 1 / mode.scale : double(in) / double(out);
  for (int64_t o = 0; o < out; ++o) {
    const auto add = [&](int64_t i, double weight) { weights[o][std::clamp<int64_t>(i, 0, in - 1)] += weight; };
    if (mode.mode == Resampling::kNearest) {
      add(static_cast<int64_t>(std::floor(float(o) * float(step))), 1);
    } else if (mode.mode == Resampling::kNearestExact) {
      add(static_cast<int64_t>(std::floor((float(o) + 0.5f) * float(step))), 1);
    } else {
      double place = (o + 0.5) * step - 0.5;
      if (mode.align_corners) place = out > 1 ? o * double(in - 1) / double(out - 1) : 0;
      if (mode.mode == Resampling::kLinear && in == out) place = o;
      const auto filter = [&](double x) {
        x = std::fabs(x);
        if (mode.mode == Resampling::kLinear) return std::max(0.0, 1 - x);
        const double a = -0.75;
        if (x <= 1) return (a + 2) * x * x * x - (a + 3) * x * x + 1;
        return x < 2 ? a * x * x * x - 5 * a * x * x + 8 * a * x - 4 * a : 0.0;
      };
      for (int64_t i = static_cast<int64_t>(std::floor(place)) - 2; i <= std::floor(place) + 3; ++i)
        add(i, filter(place - double(i)));
    }
  }
  return weights;
}

// The rows of rank `rank` of `ranks`, and the input rows they read.
ResampleAxis axis_of(const Mode& mode, int64_t in, int64_t out, int64_t ranks, int64_t rank) {
  ResampleAxis axis;
  const Interval own = owned(out, ranks, rank);
  axis.in_extent = static_cast<int32_t>(in);
  axis.out_extent = static_cast<int32_t>(out);
  axis.out_begin = static_cast<int32_t>(own.begin);
  axis.out_size = static_cast<int32_t>(own.size());
  axis.mode = mode.mode;
  axis.align_corners = mode.align_corners;
  axis.set_step(mode.scale);
  int32_t first = axis.in_extent, last = -1;
  for (int32_t o = axis.out_begin; o < axis.out_begin + axis.out_size; ++o)
    for (int k = 0; k < axis.num_taps(); ++k) {
      first = std::min(first, axis.place(axis.taps_of(o), k));
      last = std::max(last, axis.place(axis.taps_of(o), k));
    }
  axis.in_begin = last < 0 ? 0 : first;
  axis.in_size = last < 0 ? 0 : last + 1 - first;
  return axis;
}

template <typename T>
void check(const Mode& mode, int64_t in_y, int64_t in_x, int64_t out_y, int64_t out_x, int64_t inner, int64_t ranks,
           int64_t outer = 0) {
  if (outer == 0) outer = inner == 1 ? 11 : 6;  // more planes than an item takes, and not a multiple
  const auto down = matrix(mode, in_y, out_y), across = matrix(mode, in_x, out_x);
  const std::string name = "mode " + std::to_string(static_cast<int>(mode.mode)) + " " + std::to_string(in_y) + " x " +
                           std::to_string(in_x) + " to " + std::to_string(out_y) + " x " + std::to_string(out_x);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const ResampleAxis y = axis_of(mode, in_y, out_y, ranks, rank), x = axis_of(mode, in_x, out_x, 1, 0);
    auto in = test::noise(outer * y.in_size * x.in_size * inner, 1),
         out = test::noise(outer * y.out_size * x.out_size * inner, 2);
    const auto f_in = test::rounded<T>(in), f_out = test::rounded<T>(out);
    std::vector<double> expected(out.size()), adjoint(in.size());
    for (int64_t n = 0; n < outer; ++n)
      for (int64_t oy = 0; oy < y.out_size; ++oy)
        for (int64_t ox = 0; ox < x.out_size; ++ox)
          for (int64_t iy = 0; iy < y.in_size; ++iy)
            for (int64_t ix = 0; ix < x.in_size; ++ix) {
              const double weight = down[y.out_begin + oy][y.in_begin + iy] * across[x.out_begin + ox][x.in_begin + ix];
              for (int64_t i = 0; i < inner; ++i) {
                const int64_t to = ((n * y.out_size + oy) * x.out_size + ox) * inner + i;
                const int64_t from = ((n * y.in_size + iy) * x.in_size + ix) * inner + i;
                expected[to] += weight * in[from];
                adjoint[from] += weight * out[to];
              }
            }
    const auto nan = static_cast<T>(std::numeric_limits<float>::quiet_NaN());
    std::vector<T> found(out.size(), nan), back(in.size(), nan);
    const kernels::ResampleParams params{outer, inner, y, x};
    kernels::run_interpolate(kernels::RunOnHost(), f_in.data(), found.data(), params);
    kernels::run_interpolate_adjoint(kernels::RunOnHost(), f_out.data(), back.data(), params);
    std::vector<T> of_many(out.size(), nan),
        back_of_many(in.size(), nan);  // as where elements are too many for Divider
    const auto as_if_many = [&](auto taps) {
      constexpr int kTaps = decltype(taps)::value;
      kernels::RunOnHost().each(
          kernels::Interpolate<T, 1, 1, kTaps, kernels::LongDivider>(f_in.data(), of_many.data(), params));
      kernels::RunOnHost().each(kernels::InterpolateAdjoint<T, T, 1, 1, kTaps, kernels::LongDivider>(
          f_out.data(), back_of_many.data(), params));
    };
    const int taps = x.num_taps();
    if (taps == 1) as_if_many(std::integral_constant<int, 1>());
    if (taps == 2) as_if_many(std::integral_constant<int, 2>());
    if (taps == 4) as_if_many(std::integral_constant<int, 4>());
    CHECK(of_many == found);
    CHECK(back_of_many == back);
    std::vector<float> wide(in.size(), std::numeric_limits<float>::quiet_NaN());
    kernels::run_interpolate_adjoint(kernels::RunOnHost(), f_out.data(), wide.data(), params);
    for (size_t i = 0; i < back.size(); ++i) CHECK(back[i] == static_cast<T>(wide[i]));
    test::check_close(found, expected, 3 * test::tolerance<T>(), name);
    test::check_close(back, adjoint, 3 * test::tolerance<T>(), name + ", adjoint");
  }
}

const std::vector<Mode> kModes{{Resampling::kNearest, false, 0}, {Resampling::kNearestExact, false, 0},
                               {Resampling::kLinear, false, 0},  {Resampling::kLinear, true, 0},
                               {Resampling::kCubic, false, 0},   {Resampling::kCubic, true, 0},
                               {Resampling::kLinear, false, 1.7}};

void up_and_down_on_ranks() {
  for (const Mode& mode : kModes)
    for (int64_t inner : {1, 8}) {
      check<float>(mode, 8, 6, 16, 12, inner, 3);
      check<float>(mode, 9, 5, 21, 8, inner, 2);
      check<float>(mode, 9, 5, 21, 8, inner, 2, 3);  // fewer
      check<float>(mode, 17, 20, 6, 7, inner, 2);
      check<float>(mode, 5, 5, 5, 5, inner, 2);
      check<float>(mode, 1, 3, 4, 1, inner, 1);
      check<float>(mode, 4, 3, 1, 9, inner, 4);
    }
}

void half_precision() {
  for (const Mode& mode : kModes) {
    check<c10::BFloat16>(mode, 8, 6, 16, 12, 8, 2);
    check<c10::Half>(mode, 8, 6, 13, 12, 1, 2);
  }
}

}  // namespace

int main() { return test::run({{"up and down on ranks", up_and_down_on_ranks}, {"half precision", half_precision}}); }
