#include "kernels/depthwise_weight_rows.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "check.h"
#include "halo_case.h"

using namespace torchtp;
using test::DepthwiseCase;
using test::Image;
using test::Setting;

namespace {

// On one rank, with every width of vectors; the channels in two calls, as two threads would take them.
template <typename T>
void check(const Setting& s) {
  const Image in = test::random_image(s.batches, s.channels, s.height, s.width, 1);
  const Image grad_out =
      test::random_image(s.batches, s.channels, output_extent(s.y, s.height), output_extent(s.x, s.width), 2);
  const Interval rows{0, s.height}, columns{0, s.width}, out_rows{0, grad_out.height}, out_columns{0, grad_out.width};
  const DepthwiseCase convolution{s.y, s.x};
  const auto expected = test::converted<T>(convolution.weight_grad(in, grad_out, rows, columns));
  for (bool channels_last : {false, true}) {
    const auto x = test::cropped<T>(in, rows, columns, channels_last);
    const auto dy = test::cropped<T>(grad_out, out_rows, out_columns, channels_last);
    const auto params = convolution.params(in, rows, columns, out_rows, out_columns, channels_last);
    for (auto* weight_grad : kernels::depthwise_weight_rows_of_each_width<T>()) {
      auto grad = test::poisoned<T>(int64_t{params.channels} * params.y.kernel * params.x.kernel);
      const int64_t first = params.channels / 3;
      weight_grad(x.data(), dy.data(), grad.data(), params, 0, first);
      weight_grad(x.data(), dy.data(), grad.data(), params, first, params.channels);
      test::check_same(grad, expected, s.name(0, 0, channels_last));
    }
  }
}

void check_all(const std::vector<Setting>& settings) {
  test::in_each_type(settings, [](auto type, const Setting& setting) { check<decltype(type)>(setting); });
}

void usual_windows() {
  for (const Setting& setting : test::bands()) check<float>(setting);
  check<double>({7, 1, 3, 1, 2, 5, 20, 24, 1, 1});
  check<double>({{3, 2, 1, 1}, {4, 1, 2, 3}, 2, 6, 21, 24, 1, 1});
}

void frames_of_many_zeros() {
  check<float>({3, 1, 2, 1, 2, 3, 9, 17, 1, 1});
  check<float>({3, 1, 7, 1, 1, 3, 4, 5, 1, 1});
  check<c10::BFloat16>({{7, 2, 9, 1}, {5, 3, 11, 2}, 1, 9, 8, 6, 1, 1});
}

// More rows than are summed in fp32 before they are added to the totals.
void tall_images() { check<float>({{5, 1, 2, 1}, {3, 1, 1, 1}, 2, 2, 200, 9, 1, 1}); }

void extents_of_nothing() {
  for (const bool channels_last : {false, true}) {
    for (auto* weight_grad : kernels::depthwise_weight_rows_of_each_width<float>()) {
      std::vector<float> grad(18, 7.0F);
      const kernels::DepthwiseParams nothing{0, 2, 4, 4, 4, 4, {3, 1, 1, 1}, {3, 1, 1, 1}, channels_last};
      weight_grad(nullptr, nullptr, grad.data(), nothing, 0, 2);
      test::check_same(grad, std::vector<float>(18), "no images");
    }
  }
}

void dilation() { check_all(test::dilations()); }
void strides_of_two() { check_all(test::strides_of_two()); }
void any_window() { check_all(test::random_settings(60, 5)); }

}  // namespace

int main() {
  return test::run({{"usual windows", usual_windows},
                    {"frames of many zeros", frames_of_many_zeros},
                    {"tall images", tall_images},
                    {"extents of nothing", extents_of_nothing},
                    {"dilation", dilation},
                    {"strides of two", strides_of_two},
                    {"any window", any_window}});
}
