#include "kernels/bucket_pack.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <limits>
#include <string>

#include "check.h"
#include "close.h"

using namespace torchtp;
using kernels::BucketTensor;

namespace {

// Tensors of many sizes, 64 bytes apart in the flat buffer, their memory aligned as it falls.
template <typename T, typename F>
void check(const std::vector<int64_t>& counts, float scale) {
  std::vector<std::vector<T>> tensors;
  std::vector<BucketTensor> table;
  int64_t total = 0;
  for (int64_t count : counts) {
    auto values = test::noise(count + 1, static_cast<unsigned>(tensors.size()));
    tensors.push_back(test::rounded<T>(values));
    table.push_back({tensors.back().data() + count % 2, total, count});
    total = (total + count + 15) / 16 * 16;
  }
  const F untouched = static_cast<F>(77.0f);
  std::vector<F> flat(total, untouched), expected(total, untouched);
  for (const BucketTensor& tensor : table)
    for (int64_t i = 0; i < tensor.count; ++i)
      expected[tensor.begin + i] = static_cast<F>(static_cast<float>(static_cast<const T*>(tensor.data)[i]) * scale);
  kernels::bucket_pack_cpu<T, F>(table, flat.data(), scale);
  for (int64_t i = 0; i < total; ++i) CHECK_EQUAL(static_cast<float>(flat[i]), static_cast<float>(expected[i]));

  kernels::bucket_unpack_cpu<T, F>(table, flat.data(), 2);
  for (const BucketTensor& tensor : table)
    for (int64_t i = 0; i < tensor.count; ++i)
      CHECK_EQUAL(static_cast<float>(static_cast<const T*>(tensor.data)[i]),
                  static_cast<float>(static_cast<T>(static_cast<float>(expected[tensor.begin + i]) * 2)));
}

void tensors_of_all_sizes() {
  const std::vector<int64_t> counts{5, 0, 64, 8192, 1, 8193, 20000, 3};
  check<float, float>(counts, 0.5f);
  check<float, c10::BFloat16>(counts, 0.25f);
  check<float, c10::Half>(counts, 1);
  check<c10::BFloat16, float>(counts, 3);
}

void more_tensors_than_a_launch_carries() {
  std::vector<int64_t> counts(1300);
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = static_cast<int64_t>(i % 7);
  check<float, float>(counts, 1);
  check<float, float>({}, 1);
}

template <typename F>
kernels::ClipResult clip_factor(const std::vector<F>& flat, float most) {
  const auto count = static_cast<int64_t>(flat.size());
  std::vector<kernels::NormPart> parts(kernels::bucket_norm_parts(count));
  kernels::bucket_norm_cpu(flat.data(), count, parts.data());
  kernels::ClipResult result{};
  kernels::clip_factor_cpu(parts.data(), static_cast<int64_t>(parts.size()), most, &result);
  return result;
}

void norm_and_clipping() {
  for (int64_t count : {0, 1, 7, 32768, 100003}) {
    auto values = test::noise(count, 1);
    const auto flat = test::rounded<float>(values);
    double squares = 0;
    for (double value : values) squares += value * value;
    const double norm = std::sqrt(squares);
    for (float most : {1e-3f, 1e6f}) {
      const auto found = clip_factor(flat, most);
      CHECK(std::fabs(found.norm - norm) <= 1e-5 * norm);
      CHECK(std::fabs(found.factor - std::min(1.0, most / (norm + 1e-6))) <= 1e-5);
      CHECK_EQUAL(found.not_finite, 0);
    }
  }
}

void what_is_not_finite_is_found() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (float bad : {inf, -inf, nan})
    for (int64_t place : {0, 41000, 65536}) {
      std::vector<float> flat(65537, 0.5f);
      flat[place] = bad;
      const auto found = clip_factor(flat, 1.0f);
      CHECK_EQUAL(found.not_finite, 1);
      CHECK(!(found.factor > 0));
    }
  std::vector<c10::BFloat16> small(9, c10::BFloat16(0.5f));
  CHECK_EQUAL(clip_factor(small, 1.0f).not_finite, 0);
}

}  // namespace

int main() {
  return test::run({{"tensors of all sizes", tensors_of_all_sizes},
                    {"more tensors than a launch carries", more_tensors_than_a_launch_carries},
                    {"norm and clipping", norm_and_clipping},
                    {"what is not finite is found", what_is_not_finite_is_found}});
}
