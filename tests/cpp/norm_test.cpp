#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <limits>

#include "check.h"
#include "close.h"
#include "kernels/norm_plan.h"
#include "kernels/run_on_host.h"

using namespace torchtp;
using kernels::NormShape;

namespace {

struct Setting {
  int64_t batches, channels, inner;
  bool channels_last, per_batch;  // per_batch: factors of every (batch, channel)

  std::string name() const {
    return std::to_string(batches) + " x " + std::to_string(channels) + " x " + std::to_string(inner) +
           (channels_last ? " channels last" : " channels first");
  }
  int64_t count() const { return batches * channels * inner; }
  int64_t place(int64_t number, int64_t i) const {
    const int64_t n = number / channels, c = number % channels;
    return channels_last ? (n * inner + i) * channels + c : number * inner + i;
  }
  NormShape shape() const { return {channels, inner, per_batch ? channels : 0}; }
  int64_t factor(int64_t number) const { return per_batch ? number : number % channels; }
};

// The pieces of a reduction, merged: Chan's rule for moments, a plain sum for dots.
std::vector<double> merged(const std::vector<double>& first, const std::vector<double>& second,
                           const std::vector<double>& counts, int64_t numbers, bool want_second) {
  std::vector<double> out;
  for (int64_t number = 0; number < numbers; ++number) {
    double count = 0, mean = 0, m2 = 0;
    for (size_t piece = 0; piece < counts.size(); ++piece) {
      const int64_t at = static_cast<int64_t>(piece) * numbers + number;
      kernels::norm_merge(count, counts[piece], first[at], second[at], mean, m2);
      count += counts[piece];
    }
    out.push_back(want_second ? m2 : mean);
  }
  return out;
}

template <typename T>
void check(const Setting& s) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const kernels::RunOnHost run;
  const int64_t numbers = s.batches * s.channels;
  auto x = test::noise(s.count(), 1, 5), dy = test::noise(s.count(), 2);
  const auto in = test::rounded<T>(x), grad = test::rounded<T>(dy);
  auto center = test::noise(numbers, 3, 5), on_dy = test::noise(numbers, 4), on_x = test::noise(numbers, 5),
       shift = test::noise(numbers, 6);
  const auto f_center = test::rounded<float>(center), f_on_dy = test::rounded<float>(on_dy),
             f_on_x = test::rounded<float>(on_x), f_shift = test::rounded<float>(shift);

  std::vector<double> mean, m2, sum, dot, scaled(s.count()), y(s.count()), dx(s.count());
  for (int64_t number = 0; number < numbers; ++number) {
    double middle = 0, squares = 0, all = 0, product = 0;
    const int64_t f = s.factor(number);
    for (int64_t i = 0; i < s.inner; ++i) middle += x[s.place(number, i)] / static_cast<double>(s.inner);
    for (int64_t i = 0; i < s.inner; ++i) {
      const int64_t at = s.place(number, i);
      squares += (x[at] - middle) * (x[at] - middle);
      all += dy[at];
      product += dy[at] * (x[at] - center[f]);
      scaled[at] = dy[at] * on_dy[f];
      y[at] = (x[at] - center[f]) * on_x[f] + shift[f];
      dx[at] = dy[at] * on_dy[f] + (x[at] - center[f]) * on_x[f] + shift[f];
    }
    mean.push_back(middle);
    m2.push_back(squares);
    sum.push_back(all);
    dot.push_back(product);
  }

  const T* const no_dy = nullptr;
  int64_t pieces = kernels::norm_reduce_pieces(in.data(), no_dy, s.shape(), s.channels_last);
  std::vector<double> first(pieces * numbers, nan), second(first), counts(pieces, nan);
  kernels::run_norm_reduce<T, false>(run, in.data(), no_dy, nullptr, first.data(), second.data(), counts.data(),
                                     nullptr, nullptr, s.batches, s.shape(), s.channels_last, pieces, s.channels);
  test::check_close(merged(first, second, counts, numbers, false), mean, 1e-6, s.name() + ", mean");
  test::check_close(merged(first, second, counts, numbers, true), m2, 1e-5, s.name() + ", m2");

  pieces = kernels::norm_reduce_pieces(in.data(), grad.data(), s.shape(), s.channels_last);
  std::vector<T> out(s.count(), static_cast<T>(static_cast<float>(nan)));
  T* const nowhere = nullptr;
  for (T* to : {nowhere, out.data()}) {
    first.assign(pieces * numbers, nan);
    second = first;
    kernels::run_norm_reduce<T, true>(run, in.data(), grad.data(), f_center.data(), first.data(), second.data(),
                                      nullptr, to, to ? f_on_dy.data() : nullptr, s.batches, s.shape(), s.channels_last,
                                      pieces, s.channels);
    for (int64_t piece = 1; piece < pieces; ++piece)
      for (int64_t number = 0; number < numbers; ++number) {
        first[number] += first[piece * numbers + number];
        second[number] += second[piece * numbers + number];
      }
    first.resize(numbers);
    second.resize(numbers);
    test::check_close(first, sum, 1e-4, s.name() + ", sum");
    test::check_close(second, dot, 1e-4, s.name() + ", dot");
  }
  test::check_close(out, scaled, test::tolerance<T>(), s.name() + ", scaled");
  out.assign(out.size(), static_cast<T>(static_cast<float>(nan)));
  kernels::run_norm_apply<T, false>(run, no_dy, in.data(), out.data(), f_center.data(), nullptr, f_on_x.data(),
                                    f_shift.data(), s.batches, s.shape(), s.channels_last);
  test::check_close(out, y, test::tolerance<T>(), s.name() + ", affine");
  out.assign(out.size(), static_cast<T>(static_cast<float>(nan)));
  kernels::run_norm_apply<T, true>(run, grad.data(), in.data(), out.data(), f_center.data(), f_on_dy.data(),
                                   f_on_x.data(), f_shift.data(), s.batches, s.shape(), s.channels_last);
  test::check_close(out, dx, test::tolerance<T>(), s.name() + ", combine");
}

void all_layouts_and_sizes() {
  for (bool last : {false, true})
    for (bool per_batch : {false, true})
      for (int64_t channels : {1, 6, 32, 130, 300})
        for (int64_t inner : {1, 5, 64, 600}) check<float>({2, channels, inner, last, per_batch});
}

void many_pieces() {
  for (bool last : {false, true}) check<float>({2, 3, 100003, last, true});
  for (bool last : {false, true}) check<float>({1, 8, 70000, last, false});
}

void half_precision() {
  for (bool last : {false, true}) {
    check<c10::BFloat16>({2, 16, 1000, last, true});
    check<c10::BFloat16>({1, 5, 333, last, false});
    check<c10::Half>({2, 64, 50, last, false});
  }
}

}  // namespace

int main() {
  return test::run({{"all layouts and sizes", all_layouts_and_sizes},
                    {"many pieces", many_pieces},
                    {"half precision", half_precision}});
}
