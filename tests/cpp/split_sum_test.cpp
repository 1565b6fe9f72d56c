// The second stage of sums in two: any number of columns and of splits.
#include "kernels/split_sum.h"

#include <c10/util/BFloat16.h>

#include "check.h"
#include "close.h"
#include "kernels/run_on_host.h"

using namespace torchtp;

namespace {

template <typename T>
void check(int64_t count, int64_t splits) {
  auto values = test::noise(count * splits, 1, 2);
  const auto partial = test::rounded<float>(values);
  std::vector<double> expected(count);
  for (int64_t i = 0; i < count * splits; ++i) expected[i % count] += values[i];
  std::vector<T> found(count, static_cast<T>(std::nanf("")));
  kernels::RunOnHost().program(kernels::SplitSum<T>{partial.data(), found.data(), count, splits});
  test::check_close(found, expected, test::tolerance<T>(),
                    std::to_string(count) + " columns of " + std::to_string(splits));
}

void any_columns_and_splits() {
  for (int64_t count : {1, 31, 256, 1000})
    for (int64_t splits : {0, 1, 7, 9, 33, 112, 264, 600}) {
      check<float>(count, splits);
      check<c10::BFloat16>(count, splits);
    }
}

}  // namespace

int main() { return test::run({{"any columns and splits", any_columns_and_splits}}); }
