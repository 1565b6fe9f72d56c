#include "kernels/depthwise_layer_norm.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <string>

#include "check.h"
#include "close.h"
#include "halo_case.h"

using namespace torchtp;
using kernels::DepthwiseLayerNormArgs;
using kernels::DepthwiseParams;
using kernels::HaloPlanes;
using kernels::Part;
using test::Image;
using test::Setting;

namespace {

constexpr double kEps = 1e-5;

struct Factors {
  std::vector<double> weight, bias, norm_weight, norm_bias;
};

// Over the channels of [positions, channels].
struct Norm {
  std::vector<double> out, mean, rstd;

  Norm(const std::vector<double>& x, int64_t channels, const Factors& f) : out(x.size()) {
    for (size_t first = 0; first < x.size(); first += channels) {
      double middle = 0, variance = 0;
      for (int64_t c = 0; c < channels; ++c) middle += x[first + c] / channels;
      for (int64_t c = 0; c < channels; ++c) variance += std::pow(x[first + c] - middle, 2) / channels;
      mean.push_back(middle);
      rstd.push_back(1 / std::sqrt(variance + kEps));
      for (int64_t c = 0; c < channels; ++c) {
        out[first + c] = (x[first + c] - middle) * rstd.back() * f.norm_weight[c] + f.norm_bias[c];
      }
    }
  }
};

template <typename T>
struct Results {
  std::vector<T> out, convolved;
  std::vector<float> mean, rstd;

  Results(int64_t positions, int64_t channels)
      : out(test::poisoned<T>(positions * channels)),
        convolved(out),
        mean(test::poisoned<float>(positions)),
        rstd(mean) {}
  void put_in(DepthwiseLayerNormArgs<T>& args) {
    args.out = out.data();
    args.convolved = convolved.data();
    args.mean = mean.data();
    args.rstd = rstd.data();
  }
};

// [N, C, positions] as [N, positions, C].
template <typename T>
std::vector<T> channels_inner(const std::vector<T>& x, int64_t batches, int64_t channels) {
  std::vector<T> out(x.size());
  const int64_t positions = static_cast<int64_t>(x.size()) / (batches * channels);
  for (int64_t n = 0; n < batches; ++n)
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t p = 0; p < positions; ++p) {
        out[(n * positions + p) * channels + c] = x[(n * channels + c) * positions + p];
      }
  return out;
}

template <typename T>
void check_rank(const Setting& s, const test::DepthwiseCase& convolution, const Image& in, const Image& convolved,
                const Factors& factors, int64_t rank_y, int64_t rank_x, bool last) {
  const Interval in_rows = owned(s.height, s.ranks_y, rank_y), in_columns = owned(s.width, s.ranks_x, rank_x);
  const Interval rows = owned(convolved.height, s.ranks_y, rank_y), columns = owned(convolved.width, s.ranks_x, rank_x);
  const auto params = convolution.params(in, in_rows, in_columns, rows, columns, last);
  CHECK(kernels::depthwise_layer_norm_fits(params, sizeof(T), s.most_shared));
  const test::HaloCase<T> x(in, in_rows, in_columns, test::needs(rows, convolution.y, s.height),
                            test::needs(columns, convolution.x, s.width), last);
  // What the norm is of: the convolution's output as T holds it, which is exact before.
  const auto middle = test::cropped<T>(convolved, rows, columns, true);
  const Norm expected(std::vector<double>(middle.begin(), middle.end()), s.channels, factors);
  const std::string name = s.name(rank_y, rank_x, last);

  const auto weight = test::converted<T>(factors.weight), bias = test::converted<T>(factors.bias);
  const auto norm_weight = test::converted<float>(factors.norm_weight);
  const auto norm_bias = test::converted<float>(factors.norm_bias);
  DepthwiseLayerNormArgs<T> args{weight.data(),
                                 bias.empty() ? nullptr : bias.data(),
                                 norm_weight.data(),
                                 norm_bias.data(),
                                 static_cast<float>(kEps),
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};
  const int64_t positions = static_cast<int64_t>(expected.mean.size());
  const auto inner = [&](const std::vector<T>& x) { return last ? x : channels_inner(x, s.batches, s.channels); };
  const auto check_all = [&](const Results<T>& found, const std::string& how) {
    test::check_same(inner(found.convolved), middle, name + ", convolution" + how);
    test::check_close(found.mean, expected.mean, 1e-5, name + ", mean" + how);
    test::check_close(found.rstd, expected.rstd, 1e-5, name + ", 1 / standard deviation" + how);
    test::check_close(inner(found.out), expected.out, test::tolerance<T>(), name + ", output" + how);
  };
  Results<T> whole(positions, s.channels), parts(whole), alone(whole);
  whole.put_in(args);
  kernels::depthwise_layer_norm_cpu(x.planes, args, params, Part::kAll, s.most_shared);
  check_all(whole, "");

  // The interior before the halos are there: it may not touch them.
  HaloPlanes<T> own = x.planes;
  own.above = own.below = own.left = own.right = nullptr;
  parts.put_in(args);
  kernels::depthwise_layer_norm_cpu(own, args, params, Part::kInterior, s.most_shared);
  kernels::depthwise_layer_norm_cpu(x.planes, args, params, Part::kBorder, s.most_shared);
  check_all(parts, " in two parts");

  alone.put_in(args);
  args.convolved = nullptr;
  kernels::depthwise_layer_norm_cpu(x.planes, args, params, Part::kAll, s.most_shared);
  test::check_same(alone.out, whole.out, name + ", output alone");
}

template <typename T>
void check(const Setting& s, bool affine = true) {
  const test::DepthwiseCase convolution{s.y, s.x};
  const Image in = test::random_image(s.batches, s.channels, s.height, s.width, 1);
  Factors factors{std::vector<double>(s.channels * s.y.kernel * s.x.kernel),
                  std::vector<double>(affine ? s.channels : 0), std::vector<double>(s.channels, 1),
                  std::vector<double>(s.channels, 0)};
  test::fill(factors.weight, 2);
  if (affine) {
    test::fill(factors.bias, 3);
    test::fill(factors.norm_weight, 4);
    test::fill(factors.norm_bias, 5);
  }
  const Image convolved = convolution.forward(in, factors.weight, factors.bias);
  for (int64_t rank_y = 0; rank_y < s.ranks_y; ++rank_y)
    for (int64_t rank_x = 0; rank_x < s.ranks_x; ++rank_x)
      for (const bool last : {true, false}) {
        check_rank<T>(s, convolution, in, convolved, factors, rank_y, rank_x, last);
      }
}

void one_rank() {
  check<float>({7, 1, 3, 1, 2, 40, 20, 24, 1, 1});
  check<float>({3, 1, 1, 1, 1, 35, 9, 11, 1, 1});
  check<float>({5, 1, 2, 1, 1, 4, 17, 70, 1, 1});
  check<float>({7, 1, 0, 1, 1, 12, 19, 9, 1, 1});
}

void halos_of_every_side() {
  check<float>({7, 1, 3, 1, 1, 36, 24, 40, 3, 3});
  check<float>({3, 1, 1, 1, 2, 7, 10, 30, 2, 3});
  check<float>({5, 1, 2, 1, 1, 8, 13, 29, 2, 2});
}

void shards_narrower_than_the_kernel_or_empty() {
  check<float>({7, 1, 3, 1, 1, 5, 5, 9, 4, 4});
  check<float>({3, 1, 1, 1, 1, 5, 3, 5, 2, 4});
  check<float>({13, 1, 6, 1, 1, 6, 9, 10, 2, 4});
}

void kernels_of_all_sizes() {
  check<float>({1, 1, 0, 1, 1, 9, 6, 7, 1, 1});
  check<float>({4, 1, 1, 1, 1, 20, 12, 13, 2, 1});
  check<float>({9, 1, 4, 1, 1, 33, 20, 37, 2, 2});
  check<float>({13, 1, 6, 1, 1, 9, 18, 33, 1, 2});
  check<float>({21, 1, 10, 1, 1, 8, 22, 24, 1, 2});
}

void channels_of_all_sizes() {
  for (int64_t channels : {2, 31, 32, 96, 130, 600}) check<float>({3, 1, 1, 1, 1, channels, 6, 18, 1, 1});
  check<float>({3, 1, 1, 1, 1, 1024, 3, 9, 1, 2});
}

void half_precision() {
  check<c10::BFloat16>({7, 1, 3, 1, 1, 64, 9, 20, 2, 2});
  check<c10::BFloat16>({3, 1, 1, 1, 1, 2048, 5, 4, 1, 1});
  check<c10::BFloat16>({9, 1, 4, 1, 1, 20, 12, 24, 1, 2});
  check<c10::Half>({7, 1, 3, 1, 1, 37, 12, 11, 2, 1});
  check<c10::Half>({5, 1, 2, 1, 2, 40, 8, 16, 1, 1});
}

void blocks_with_little_shared_memory() {
  for (size_t most : {kernels::kLeastSharedBytes, size_t{147 * 1024}}) {
    check<float>({7, 1, 3, 1, 1, 150, 9, 20, 1, 1, most});
    check<float>({7, 1, 3, 1, 1, 300, 40, 3, 1, 1, most});
    check<c10::BFloat16>({3, 1, 1, 1, 1, 900, 5, 9, 1, 1, most});
  }
}

// What is known when the kernel is compiled counts towards the 48 KiB that need no leave: 45 KiB beside 4.
void blocks_with_almost_as_much_as_needs_no_leave() { check<float>({5, 1, 2, 1, 2, 8, 9, 21, 1, 1}); }

void without_bias_and_factors() { check<float>({7, 1, 3, 1, 2, 24, 12, 10, 1, 2}, false); }

void what_fits() {
  const auto asks = [](const auto& whether, int32_t kernel, int32_t channels, int64_t bytes, size_t most, bool last) {
    const DepthwiseParams params{1, channels, 9, 9, 9, 9, {kernel, 1, 1, 0}, {kernel, 1, 1, 0}, last};
    return whether(params, bytes, most);
  };
  const auto& fits = kernels::depthwise_layer_norm_fits;
  constexpr size_t kMost = kernels::kMostSharedBytes, kLeast = kernels::kLeastSharedBytes;
  for (const bool last : {true, false}) {
    CHECK(asks(fits, 7, 2048, 2, kMost, last) && asks(fits, 7, 1024, 4, kMost, last));
    CHECK(!asks(fits, 7, 2048, 4, kMost, last) && asks(fits, 7, 768, 2, kLeast, last));
    CHECK(!asks(fits, 7, 1024, 2, kLeast, last) && !asks(fits, 31, 8, 2, kMost, last));
    DepthwiseParams params{1, 8, 9, 9, 9, 9, {3, 1, 1, 1}, {3, 1, 1, 1}, last};
    params.y.dilation = 2;
    CHECK(!fits(params, 4, kMost));
  }
}

}  // namespace

int main() {
  return test::run({{"one rank", one_rank},
                    {"halos of every side", halos_of_every_side},
                    {"shards narrower than the kernel or empty", shards_narrower_than_the_kernel_or_empty},
                    {"kernels of all sizes", kernels_of_all_sizes},
                    {"channels of all sizes", channels_of_all_sizes},
                    {"half precision", half_precision},
                    {"blocks with little shared memory", blocks_with_little_shared_memory},
                    {"blocks with almost as much as needs no leave", blocks_with_almost_as_much_as_needs_no_leave},
                    {"without bias and factors", without_bias_and_factors},
                    {"what fits", what_fits}});
}
