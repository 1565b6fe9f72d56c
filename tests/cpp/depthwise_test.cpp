#include "kernels/depthwise.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <string>

#include "check.h"
#include "halo_case.h"

using namespace torchtp;
using kernels::Part;
using test::DepthwiseCase;
using test::HaloCase;
using test::Image;
using test::needs;
using test::readers;
using test::Setting;

namespace {

template <typename T>
void check_rank(const Setting& s, const DepthwiseCase& convolution, const Image& in, const Image& out,
                const Image& grad_out, const Image& grad_in, const std::vector<T>& weight, const std::vector<T>& bias,
                int64_t rank_y, int64_t rank_x, bool channels_last) {
  const Interval in_rows = owned(s.height, s.ranks_y, rank_y), in_columns = owned(s.width, s.ranks_x, rank_x);
  const Interval out_rows = owned(out.height, s.ranks_y, rank_y), out_columns = owned(out.width, s.ranks_x, rank_x);
  const auto params = convolution.params(in, in_rows, in_columns, out_rows, out_columns, channels_last);
  const HaloCase<T> x(in, in_rows, in_columns, needs(out_rows, s.y, s.height), needs(out_columns, s.x, s.width),
                      channels_last);
  const HaloCase<T> dy(grad_out, out_rows, out_columns, readers(in_rows, s.y, out.height),
                       readers(in_columns, s.x, out.width), channels_last);
  const auto y_expected = test::cropped<T>(out, out_rows, out_columns, channels_last);
  const auto dx_expected = test::cropped<T>(grad_in, in_rows, in_columns, channels_last);
  const std::string name = s.name(rank_y, rank_x, channels_last);

  auto y = test::poisoned<T>(y_expected.size()), dx = test::poisoned<T>(dx_expected.size());
  kernels::depthwise_cpu(x.planes, weight.data(), bias.data(), y.data(), params, Part::kAll, s.most_shared);
  test::check_same(y, y_expected, name + ", forward");
  kernels::depthwise_input_grad_cpu(dy.planes, weight.data(), dx.data(), params, Part::kAll, s.most_shared);
  test::check_same(dx, dx_expected, name + ", gradient of the input");

  // The interior before the halos are there: it may not touch them.
  auto alone = x.planes, grad_alone = dy.planes;
  for (auto* planes : {&alone, &grad_alone}) planes->above = planes->below = planes->left = planes->right = nullptr;
  y = test::poisoned<T>(y.size());
  dx = test::poisoned<T>(dx.size());
  kernels::depthwise_cpu(alone, weight.data(), bias.data(), y.data(), params, Part::kInterior, s.most_shared);
  kernels::depthwise_input_grad_cpu(grad_alone, weight.data(), dx.data(), params, Part::kInterior, s.most_shared);
  kernels::depthwise_cpu(x.planes, weight.data(), bias.data(), y.data(), params, Part::kBorder, s.most_shared);
  kernels::depthwise_input_grad_cpu(dy.planes, weight.data(), dx.data(), params, Part::kBorder, s.most_shared);
  test::check_same(y, y_expected, name + ", forward in two parts");
  test::check_same(dx, dx_expected, name + ", gradient of the input in two parts");
}

template <typename T>
void check(const Setting& s) {
  const DepthwiseCase convolution{s.y, s.x};
  const Image in = test::random_image(s.batches, s.channels, s.height, s.width, 1);
  std::vector<double> weight(s.channels * s.y.kernel * s.x.kernel), bias(s.channels);
  test::fill(weight, 2);
  test::fill(bias, 3);
  const Image out = convolution.forward(in, weight, bias);
  const Image grad_out = test::random_image(s.batches, s.channels, out.height, out.width, 4);
  const Image grad_in = convolution.input_grad(in, grad_out, weight);
  for (int64_t rank_y = 0; rank_y < s.ranks_y; ++rank_y)
    for (int64_t rank_x = 0; rank_x < s.ranks_x; ++rank_x)
      for (bool channels_last : {false, true})
        check_rank<T>(s, convolution, in, out, grad_out, grad_in, test::converted<T>(weight), test::converted<T>(bias),
                      rank_y, rank_x, channels_last);
}

void one_rank() {
  check<float>({7, 1, 3, 1, 2, 3, 20, 24, 1, 1});
  check<float>({3, 1, 1, 1, 1, 35, 9, 11, 1, 1});
  check<float>({5, 1, 2, 1, 1, 4, 17, 70, 1, 1});
  check<float>({3, 2, 1, 1, 2, 3, 17, 21, 1, 1});
  check<float>({7, 2, 3, 1, 1, 5, 40, 33, 1, 1});
  check<float>({5, 2, 2, 1, 1, 3, 12, 13, 1, 1});
  check<float>({7, 1, 0, 1, 1, 2, 19, 9, 1, 1});
}

void halos_of_every_side() {
  check<float>({7, 1, 3, 1, 1, 4, 24, 40, 3, 3});
  check<float>({3, 1, 1, 1, 2, 3, 10, 30, 2, 3});
  check<float>({5, 1, 2, 1, 1, 2, 13, 29, 2, 2});
  check<float>({3, 2, 1, 1, 1, 3, 17, 23, 2, 3});
  check<float>({7, 2, 3, 1, 1, 3, 31, 30, 2, 2});
}

void shards_narrower_than_the_kernel_or_empty() {
  check<float>({7, 1, 3, 1, 1, 3, 5, 9, 4, 4});
  check<float>({3, 1, 1, 1, 1, 3, 3, 5, 2, 4});
  check<float>({13, 1, 6, 1, 1, 2, 9, 10, 2, 4});
}

// Large enough for the interior to be launched by itself.
void interiors() {
  check<float>({3, 1, 1, 1, 1, 2, 192, 258, 3, 2});
  check<c10::BFloat16>({3, 1, 1, 1, 1, 2, 130, 393, 2, 3});
  check<c10::Half>({7, 1, 3, 1, 1, 1, 61, 260, 1, 2});
  check<float>({3, 2, 1, 1, 1, 1, 260, 264, 2, 2});
}

void wide_kernels() {
  check<float>({9, 1, 4, 1, 1, 3, 20, 70, 2, 2});
  check<float>({13, 1, 6, 1, 1, 9, 18, 33, 1, 2});
  check<float>({31, 1, 15, 1, 1, 2, 16, 20, 2, 2});
  check<float>({4, 1, 1, 1, 1, 2, 12, 13, 2, 1});
}

void dilation() {
  for (const Setting& setting : test::dilations()) check<float>(setting);
  for (int64_t kernel : {3, 7, 9}) check<c10::BFloat16>({kernel, 1, kernel / 2 * 2, 2, 1, 8, 16, 24, 1, 2});
}

void strides_of_two() {
  for (const Setting& setting : test::strides_of_two()) check<float>(setting);
  for (int64_t kernel : {3, 5, 7}) check<c10::Half>({kernel, 2, kernel / 2, 1, 1, 8, 16, 24, 1, 2});
  check<c10::BFloat16>({7, 2, 3, 1, 1, 4, 48, 80, 2, 1});
  // Whole eights of columns, where halos lie on any side; and as many channels as leave lanes idle, or few.
  for (int64_t kernel : {3, 5, 7}) {
    check<float>({kernel, 2, kernel / 2, 1, 2, 3, 40, 80, 2, 2});
    check<c10::BFloat16>({kernel, 2, kernel / 2, 1, 1, 5, 70, 160, 2, 1});
    check<c10::Half>({kernel, 2, kernel / 2, 1, 1, 2, 30, 96, 1, 3});
    for (int64_t channels : {1, 36, 130}) check<c10::BFloat16>({kernel, 2, kernel / 2, 1, 1, channels, 9, 14, 2, 2});
  }
}

// Kernel, stride and dilation as numbers.
void every_other_window() {
  check<float>({31, 2, 15, 1, 1, 2, 70, 140, 1, 2});
  check<float>({9, 2, 4, 1, 1, 9, 70, 140, 2, 1});
  check<float>({3, 2, 2, 2, 2, 3, 40, 70, 1, 1});
  check<float>({31, 4, 15, 1, 1, 2, 66, 35, 2, 1, kernels::kLeastSharedBytes});
  check<float>({29, 3, 28, 2, 1, 9, 41, 40, 1, 1, kernels::kLeastSharedBytes});
  check<float>({{3, 2, 1, 1}, {7, 1, 3, 1}, 1, 3, 33, 40, 2, 2});
  check<float>({{2, 4, 0, 1}, {1, 3, 0, 1}, 2, 3, 33, 40, 2, 2});
  test::in_each_type(test::random_settings(30, 1),
                     [](auto type, const Setting& setting) { check<decltype(type)>(setting); });
}

void half_precision() {
  for (const Setting& setting : test::bands()) {
    check<c10::BFloat16>(setting);
    check<c10::Half>(setting);
  }
  check<c10::BFloat16>({3, 1, 1, 1, 1, 8, 16, 24, 2, 2});
  check<c10::BFloat16>({7, 1, 3, 1, 1, 4, 24, 32, 1, 2});
  check<c10::Half>({7, 1, 3, 1, 1, 4, 24, 32, 2, 1});
  check<c10::Half>({9, 1, 4, 1, 1, 4, 16, 24, 1, 2});
}

void blocks_with_little_shared_memory() {
  for (size_t most : {kernels::kLeastSharedBytes, size_t{147 * 1024}}) {
    check<float>({7, 1, 3, 1, 1, 150, 3, 4, 1, 1, most});
    check<float>({7, 1, 3, 1, 1, 33, 70, 3, 1, 1, most});
    check<float>({7, 2, 3, 1, 1, 33, 44, 36, 1, 2, most});
    check<float>({7, 2, 3, 1, 1, 140, 5, 4, 1, 1, most});
    check<float>({7, 2, 3, 1, 3, 140, 7, 9, 1, 1, most});
    check<float>({5, 2, 2, 1, 1, 40, 70, 66, 1, 1, most});
    check<float>({3, 2, 1, 1, 1, 150, 6, 70, 1, 1, most});
    check<float>({7, 1, 9, 3, 1, 150, 8, 10, 1, 1, most});
    check<float>({7, 1, 6, 2, 1, 33, 140, 6, 1, 1, most});
    check<float>({13, 1, 12, 2, 1, 9, 30, 70, 1, 1, most});
    check<float>({31, 1, 15, 1, 1, 9, 18, 40, 1, 1, most});
  }
}

}  // namespace

int main() {
  return test::run({{"one rank", one_rank},
                    {"halos of every side", halos_of_every_side},
                    {"shards narrower than the kernel or empty", shards_narrower_than_the_kernel_or_empty},
                    {"interiors", interiors},
                    {"wide kernels", wide_kernels},
                    {"dilation", dilation},
                    {"strides of two", strides_of_two},
                    {"every other window", every_other_window},
                    {"blocks with little shared memory", blocks_with_little_shared_memory},
                    {"half precision", half_precision}});
}
