#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <limits>

#include "check.h"
#include "close.h"
#include "kernels/layer_norm_plan.h"
#include "kernels/run_on_host.h"

using namespace torchtp;
using kernels::LayerNormParams;

namespace {

// Element (n, c, i) of [N, C, inner] or [N, inner, C].
int64_t place(const LayerNormParams& p, bool channels_last, int64_t n, int64_t c, int64_t i) {
  return channels_last ? (n * p.inner + i) * p.channels + c : (n * p.channels + c) * p.inner + i;
}

struct Reference {
  std::vector<double> y, mean, rstd, dx, gradients;
};

Reference reference(const LayerNormParams& p, bool last, double eps, const std::vector<double>& x,
                    const std::vector<double>& weight, const std::vector<double>& bias, const std::vector<double>& dy) {
  Reference r;
  r.y.resize(x.size());
  r.dx.resize(x.size());
  r.gradients.resize(2 * p.channels);
  for (int64_t n = 0; n < p.batches; ++n)
    for (int64_t i = 0; i < p.inner; ++i) {
      double mean = 0, variance = 0, sum = 0, dot = 0;
      const auto at = [&](int64_t c) { return place(p, last, n, c, i); };
      for (int64_t c = 0; c < p.channels; ++c) mean += x[at(c)] / p.channels;
      for (int64_t c = 0; c < p.channels; ++c) variance += (x[at(c)] - mean) * (x[at(c)] - mean) / p.channels;
      const double rstd = 1 / std::sqrt(variance + eps);
      r.mean.push_back(mean);
      r.rstd.push_back(rstd);
      for (int64_t c = 0; c < p.channels; ++c) {
        const double normed = (x[at(c)] - mean) * rstd;
        r.y[at(c)] = normed * weight[c] + bias[c];
        sum += dy[at(c)] * weight[c] / p.channels;
        dot += dy[at(c)] * weight[c] * normed / p.channels;
        r.gradients[c] += dy[at(c)] * normed;
        r.gradients[p.channels + c] += dy[at(c)];
      }
      for (int64_t c = 0; c < p.channels; ++c)
        r.dx[at(c)] = rstd * (dy[at(c)] * weight[c] - sum - (x[at(c)] - mean) * rstd * dot);
    }
  return r;
}

template <typename T>
void check(const LayerNormParams& p, bool last, size_t most_shared = kernels::kMostSharedBytes, bool narrow = false) {
  const std::string name = std::to_string(p.batches) + " x " + std::to_string(p.channels) + " x " +
                           std::to_string(p.inner) + (last ? " channels last" : " channels first");
  const double eps = 1e-5;
  const int64_t count = p.batches * p.channels * p.inner;
  auto x = test::noise(count, 1, 3), dy = test::noise(count, 2), weight = test::noise(p.channels, 3, 1),
       bias = test::noise(p.channels, 4);
  const auto in = test::rounded<T>(x), grad = test::rounded<T>(dy);
  std::vector<T> narrow_w, narrow_b;
  if (narrow) narrow_w = test::rounded<T>(weight), narrow_b = test::rounded<T>(bias);
  const auto w = test::rounded<float>(weight), b = test::rounded<float>(bias);
  const Reference r = reference(p, last, eps, x, weight, bias, dy);

  const auto nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<T> y(count, static_cast<T>(nan)), dx(count, static_cast<T>(nan));
  std::vector<float> mean(p.batches * p.inner, nan), rstd(p.batches * p.inner, nan), gradients(2 * p.channels, nan);
  std::vector<float> scratch(kernels::layer_norm_backward_scratch(p), nan);
  const auto* const no_float = static_cast<const float*>(nullptr);
  const kernels::Factors<T> weights{narrow ? narrow_w.data() : nullptr, narrow ? no_float : w.data()};
  const kernels::Factors<T> biases{narrow ? narrow_b.data() : nullptr, narrow ? no_float : b.data()};
  kernels::run_layer_norm(kernels::RunOnHost{most_shared}, in.data(), weights, biases, eps, y.data(), mean.data(),
                          rstd.data(), p, last);
  test::check_close(y, r.y, test::tolerance<T>(), name + ", output");
  test::check_close(mean, r.mean, 1e-5, name + ", mean");
  test::check_close(rstd, r.rstd, 1e-5, name + ", 1 / standard deviation");

  const auto backward = [&](T* out) {
    gradients.assign(gradients.size(), nan);
    kernels::run_layer_norm_backward(kernels::RunOnHost{most_shared}, grad.data(), in.data(), weights, mean.data(),
                                     rstd.data(), out, gradients.data(), scratch.data(), p, last);
    test::check_close(gradients, r.gradients, 2e-5, name + ", gradients of weight and bias");
  };
  backward(dx.data());
  const int few = p.channels < 8 ? 10 : 2;  // of three numbers the difference of large ones is left
  test::check_close(dx, r.dx, few * test::tolerance<T>(), name + ", gradient of the input");
  backward(nullptr);
}

void channels_of_all_sizes() {
  for (bool last : {false, true})
    for (int64_t channels : {1, 3, 8, 32, 96, 100, 257, 600, 1024, 2048})
      check<float>({2, channels, channels > 256 ? 6 : 20}, last);
}

void positions_of_all_sizes() {
  for (bool last : {false, true})
    for (int64_t inner : {1, 4, 7, 31, 64, 130, 1100}) check<float>({3, 12, inner}, last);
}

void half_precision() {
  for (bool last : {false, true}) {
    check<c10::BFloat16>({2, 96, 68}, last);
    check<c10::BFloat16>({1, 2048, 20}, last);
    check<c10::Half>({2, 64, 33}, last);
    check<c10::Half>({1, 1024, 5}, last);
    check<c10::BFloat16>({3, 160, 24}, last, kernels::kMostSharedBytes, true);
    check<c10::Half>({2, 1536, 12}, last, kernels::kMostSharedBytes, true);
    check<c10::Half>({2, 37, 9}, last, kernels::kMostSharedBytes, true);
  }
}

void many_tiles_for_a_block() {
  for (bool last : {false, true}) check<float>({1, 16, 40000}, last);
}

void blocks_with_little_shared_memory() {
  const auto fits = [](int64_t channels, size_t most) {
    return kernels::layer_norm_fits({1, channels, 1}, false, most);
  };
  for (size_t most : {kernels::kLeastSharedBytes, size_t{147 * 1024}}) {
    int64_t channels = 2048;
    while (!fits(channels, most)) --channels;
    check<float>({1, channels, 20}, false, most);
    check<float>({1, channels, 7}, false, most);
    while (channels < 2048 && fits(channels + 1, most)) ++channels;
    check<c10::BFloat16>({1, channels, 20}, false, most);
    check<float>({2, 300, 40}, false, most);
    check<float>({1, 2048, 5}, true, most);
  }
  CHECK(fits(2048, kernels::kMostSharedBytes));
  CHECK(!fits(2048, kernels::kLeastSharedBytes));
  CHECK(kernels::layer_norm_fits({1, 2048, 1}, true, kernels::kLeastSharedBytes));
}

void nothing() {
  for (bool last : {false, true}) check<float>({0, 5, 4}, last);
}

}  // namespace

int main() {
  return test::run({{"channels of all sizes", channels_of_all_sizes},
                    {"positions of all sizes", positions_of_all_sizes},
                    {"half precision", half_precision},
                    {"many tiles for a block", many_tiles_for_a_block},
                    {"blocks with little shared memory", blocks_with_little_shared_memory},
                    {"nothing", nothing}});
}
