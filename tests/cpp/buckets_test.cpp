#include "check.h"
#include "gradients/bucket_plan.h"
#include "gradients/statistics.h"

namespace {

using torchtp::gradients::cover;
using torchtp::gradients::Coverage;
using torchtp::gradients::plan_buckets;
using torchtp::gradients::Span;
using torchtp::gradients::Traveller;

std::string text(const std::vector<std::vector<size_t>>& plan) {
  std::string result;
  for (const auto& bucket : plan) {
    result += "[";
    for (const size_t index : bucket) result += std::to_string(index) + " ";
    result += "]";
  }
  return result;
}

void test_first_bucket_is_small_and_order_is_kept() {
  const std::vector<Traveller> travellers(6, {10, "float"});
  CHECK_EQUAL(text(plan_buckets(travellers, {5, 4, 3, 2, 1, 0}, 10, 30)), "[5 ][4 3 2 ][1 0 ]");
}

void test_a_kind_has_its_own_buckets_in_order_of_completion() {
  const std::vector<Traveller> travellers{{10, "float"}, {10, "half"}, {10, "float"}, {10, "half"}, {10, "float"}};
  // The bucket of halves is complete before that of the last float.
  CHECK_EQUAL(text(plan_buckets(travellers, {0, 1, 2, 3, 4}, 20, 100)), "[0 2 ][1 3 ][4 ]");
}

void test_only_what_is_in_the_order_travels() {
  const std::vector<Traveller> travellers(4, {10, "float"});
  CHECK_EQUAL(text(plan_buckets(travellers, {3, 1}, 1000, 1000)), "[3 1 ]");
  CHECK_EQUAL(text(plan_buckets(travellers, {}, 1000, 1000)), "");
}

void test_time_under_way_counts_once() {
  const int64_t second = 1000000000;
  const Coverage coverage = cover({{4 * second, 6 * second}, {0, 2 * second}, {1 * second, 3 * second}}, 5 * second);
  CHECK_EQUAL(coverage.all, 5.0);
  CHECK_EQUAL(coverage.before_limit, 4.0);
  CHECK_EQUAL(cover({{0, 2 * second}}, 0).before_limit, 0.0);
  CHECK_EQUAL(cover({}, 0).all, 0.0);
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"first_bucket_is_small_and_order_is_kept", test_first_bucket_is_small_and_order_is_kept},
      {"a_kind_has_its_own_buckets_in_order_of_completion", test_a_kind_has_its_own_buckets_in_order_of_completion},
      {"only_what_is_in_the_order_travels", test_only_what_is_in_the_order_travels},
      {"time_under_way_counts_once", test_time_under_way_counts_once},
  });
}
