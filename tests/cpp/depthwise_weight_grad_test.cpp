#include "kernels/depthwise_weight_grad.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "check.h"
#include "halo_case.h"

using namespace torchtp;
using test::DepthwiseCase;
using test::HaloCase;
using test::Image;
using test::Setting;

namespace {

// [C * taps] of one rank; `scratch` of exactly the size that was asked for.
template <typename T>
std::vector<T> weight_grad(const HaloCase<T>& in, const HaloCase<T>& grad_out, const kernels::DepthwiseParams& params,
                           size_t most_shared) {
  const int64_t floats = kernels::depthwise_weight_grad_scratch(in.planes, grad_out.planes, params, most_shared);
  auto scratch = test::poisoned<float>(floats);
  auto grad = test::poisoned<T>(int64_t{params.channels} * params.y.kernel * params.x.kernel);
  kernels::depthwise_weight_grad_cpu(in.planes, grad_out.planes, grad.data(), scratch.data(), params, most_shared);
  return grad;
}

template <typename T>
void check_rank(const Setting& s, const Image& in, const Image& grad_out, int64_t rank_y, int64_t rank_x) {
  const DepthwiseCase convolution{s.y, s.x};
  const Interval in_rows = owned(s.height, s.ranks_y, rank_y), in_columns = owned(s.width, s.ranks_x, rank_x);
  const Interval out_rows = owned(grad_out.height, s.ranks_y, rank_y),
                 out_columns = owned(grad_out.width, s.ranks_x, rank_x);
  Image own_only(grad_out.batches, grad_out.channels, grad_out.height, grad_out.width);
  for (int64_t n = 0; n < s.batches; ++n)
    for (int64_t c = 0; c < s.channels; ++c)
      for (int64_t y = out_rows.begin; y < out_rows.end; ++y)
        for (int64_t x = out_columns.begin; x < out_columns.end; ++x) own_only.at(n, c, y, x) = grad_out.at(n, c, y, x);
  const auto of_own_in = test::converted<T>(convolution.weight_grad(in, grad_out, in_rows, in_columns));
  const auto of_own_grad = test::converted<T>(convolution.weight_grad(in, own_only, {0, s.height}, {0, s.width}));

  for (bool channels_last : {false, true}) {
    const auto params = convolution.params(in, in_rows, in_columns, out_rows, out_columns, channels_last);
    const std::string name = s.name(rank_y, rank_x, channels_last);
    // Own input, gradient with its halo: products are counted by the owner of the input.
    const HaloCase<T> own_in(in, in_rows, in_columns, in_rows, in_columns, channels_last);
    const HaloCase<T> wide_grad(grad_out, out_rows, out_columns, test::readers(in_rows, s.y, grad_out.height),
                                test::readers(in_columns, s.x, grad_out.width), channels_last);
    test::check_same(weight_grad(own_in, wide_grad, params, s.most_shared), of_own_in, name + ", halo of the gradient");
    // Own gradient, input with its halo: counted by the owner of the gradient.
    const HaloCase<T> own_grad(grad_out, out_rows, out_columns, out_rows, out_columns, channels_last);
    const HaloCase<T> wide_in(in, in_rows, in_columns, test::needs(out_rows, s.y, s.height),
                              test::needs(out_columns, s.x, s.width), channels_last);
    test::check_same(weight_grad(wide_in, own_grad, params, s.most_shared), of_own_grad, name + ", halo of the input");
  }
}

template <typename T>
void check(const Setting& s) {
  const Image in = test::random_image(s.batches, s.channels, s.height, s.width, 1);
  const Image grad_out =
      test::random_image(s.batches, s.channels, output_extent(s.y, s.height), output_extent(s.x, s.width), 2);
  for (int64_t rank_y = 0; rank_y < s.ranks_y; ++rank_y)
    for (int64_t rank_x = 0; rank_x < s.ranks_x; ++rank_x) check_rank<T>(s, in, grad_out, rank_y, rank_x);
}

void one_rank() {
  check<float>({7, 1, 3, 1, 2, 3, 20, 24, 1, 1});
  check<float>({3, 1, 1, 1, 3, 35, 9, 11, 1, 1});
  check<float>({5, 1, 2, 1, 1, 4, 17, 70, 1, 1});
  check<float>({7, 1, 0, 1, 1, 2, 19, 9, 1, 1});
}

void halos_of_every_side() {
  check<float>({7, 1, 3, 1, 1, 4, 24, 40, 3, 3});
  check<float>({3, 1, 1, 1, 2, 3, 10, 30, 2, 3});
  check<float>({5, 1, 2, 1, 1, 2, 13, 29, 2, 2});
}

void shards_narrower_than_the_kernel_or_empty() {
  check<float>({7, 1, 3, 1, 1, 3, 5, 9, 4, 4});
  check<float>({3, 1, 1, 1, 1, 3, 3, 5, 2, 4});
}

void wide_kernels() {
  check<float>({13, 1, 6, 1, 2, 3, 20, 70, 2, 2});
  check<float>({31, 1, 15, 1, 1, 2, 18, 40, 1, 2});
  check<float>({9, 1, 4, 1, 1, 11, 33, 9, 2, 1});
  check<float>({6, 1, 2, 1, 1, 2, 12, 13, 2, 2});
  check<c10::BFloat16>({11, 1, 5, 1, 1, 9, 12, 36, 1, 2});
}

void dilation() {
  for (const Setting& setting : test::dilations()) check<float>(setting);
  check<c10::Half>({3, 1, 2, 2, 1, 8, 16, 24, 2, 2});
}

// There the points are the output's gradient, with its halo if it has one.
void strides_of_two() {
  for (const Setting& setting : test::strides_of_two()) check<float>(setting);
  check<c10::BFloat16>({7, 2, 3, 1, 1, 4, 48, 80, 2, 1});
  check<c10::Half>({3, 2, 1, 1, 1, 8, 16, 24, 1, 2});
  // As many channels as leave lanes idle, or few.
  for (int64_t kernel : {3, 5}) {
    for (int64_t channels : {1, 36, 130}) check<c10::BFloat16>({kernel, 2, kernel / 2, 1, 1, channels, 9, 14, 2, 2});
    check<float>({kernel, 1, kernel, 2, 2, 40, 21, 30, 2, 1});
  }
}

// Kernel, stride and dilation as numbers.
void every_other_window() {
  check<float>({31, 2, 15, 1, 1, 2, 40, 50, 1, 2});
  check<float>({9, 2, 4, 1, 1, 9, 40, 70, 2, 1});
  check<float>({3, 2, 2, 2, 2, 3, 40, 70, 1, 1});
  check<float>({31, 4, 15, 1, 1, 1, 36, 35, 2, 1, kernels::kLeastSharedBytes});
  check<float>({29, 3, 28, 2, 1, 2, 31, 30, 1, 1, kernels::kLeastSharedBytes});
  check<float>({{3, 2, 1, 1}, {7, 1, 3, 1}, 1, 3, 33, 40, 2, 2});
  check<float>({{2, 4, 0, 1}, {1, 3, 0, 1}, 2, 3, 33, 40, 2, 2});
  test::in_each_type(test::random_settings(18, 2),
                     [](auto type, const Setting& setting) { check<decltype(type)>(setting); });
}

void half_precision() {
  for (const Setting& setting : test::bands()) {
    check<c10::BFloat16>(setting);
    check<c10::Half>(setting);
  }
  check<c10::BFloat16>({3, 1, 1, 1, 1, 8, 16, 24, 2, 2});
  check<c10::Half>({7, 1, 3, 1, 1, 4, 24, 32, 1, 2});
}

void blocks_with_little_shared_memory() {
  for (size_t most : {kernels::kLeastSharedBytes, size_t{147 * 1024}}) {
    check<float>({7, 1, 3, 1, 1, 150, 3, 4, 1, 1, most});
    check<float>({7, 1, 3, 1, 1, 33, 70, 3, 1, 1, most});
    check<float>({7, 2, 3, 1, 1, 150, 5, 7, 1, 1, most});
    check<float>({7, 2, 3, 1, 1, 33, 90, 50, 1, 1, most});
    check<float>({7, 1, 9, 3, 1, 150, 8, 10, 1, 1, most});
    check<float>({7, 1, 6, 2, 1, 33, 140, 6, 1, 1, most});
    check<float>({31, 1, 15, 1, 1, 9, 18, 40, 1, 1, most});
  }
}

}  // namespace

int main() {
  return test::run({{"one rank", one_rank},
                    {"halos of every side", halos_of_every_side},
                    {"shards narrower than the kernel or empty", shards_narrower_than_the_kernel_or_empty},
                    {"wide kernels", wide_kernels},
                    {"dilation", dilation},
                    {"strides of two", strides_of_two},
                    {"every other window", every_other_window},
                    {"blocks with little shared memory", blocks_with_little_shared_memory},
                    {"half precision", half_precision}});
}
