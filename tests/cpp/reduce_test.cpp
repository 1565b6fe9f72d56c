// Reductions of 16-bit numbers against the same by c10's conversions, one element at a time.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstring>
#include <random>

#include "check.h"
#include "collectives/reduce_op.h"

using namespace torchtp::collectives;

namespace {

float combine(float a, float b, ReduceOp op) {
  if (op == ReduceOp::kProduct) return a * b;
  if (op == ReduceOp::kMin) return (a < b || a != a) ? a : b;
  if (op == ReduceOp::kMax) return (a > b || a != a) ? a : b;
  return a + b;
}

template <typename T>
T expected(const std::vector<std::vector<T>>& inputs, size_t i, ReduceOp op) {
  float value = static_cast<float>(inputs[0][i]);
  for (size_t r = 1; r < inputs.size(); ++r) value = combine(value, static_cast<float>(inputs[r][i]), op);
  if (op == ReduceOp::kAvg) value /= static_cast<float>(inputs.size());
  return static_cast<T>(value);
}

template <typename T>
bool same(T a, T b) {
  const bool nan = std::isnan(static_cast<float>(a));
  return nan ? std::isnan(static_cast<float>(b)) : std::memcmp(&a, &b, sizeof(T)) == 0;
}

// Every bit pattern, combined with others of any size, in and out of place.
template <typename T>
void every_number_is_reduced_as_element_by_element(c10::ScalarType dtype) {
  std::mt19937 random(1);
  constexpr size_t kCount = 65536;
  for (const size_t num_inputs : {1, 2, 3, 4}) {
    std::vector<std::vector<T>> inputs(num_inputs, std::vector<T>(kCount));
    for (size_t i = 0; i < kCount; ++i) {
      for (size_t r = 0; r < num_inputs; ++r) {
        const auto bits = static_cast<uint16_t>(r == 0 ? i : random());
        std::memcpy(&inputs[r][i], &bits, sizeof(T));
      }
    }
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      for (const bool in_place : {false, true}) {
        auto sources = inputs;
        std::vector<T> separate(kCount);
        std::vector<T>& out = in_place ? sources.back() : separate;
        std::vector<const std::byte*> pointers;
        for (const auto& source : sources) pointers.push_back(reinterpret_cast<const std::byte*>(source.data()));
        reduce_inputs(reinterpret_cast<std::byte*>(out.data()), pointers, kCount, dtype, op);
        for (size_t i = 0; i < kCount; ++i) CHECK(same(expected(inputs, i, op), out[i]));
      }
    }
  }
}

// What is left over of whole vectors: not a byte beyond the end is read or written.
template <typename T>
void any_number_of_elements(c10::ScalarType dtype) {
  for (size_t count = 0; count <= 40; ++count) {
    std::vector<std::vector<T>> inputs(3, std::vector<T>(count));
    for (size_t r = 0; r < 3; ++r) {
      for (size_t i = 0; i < count; ++i) inputs[r][i] = static_cast<T>(static_cast<float>(r * 50 + i) / 8);
    }
    std::vector<T> out(count + 1, static_cast<T>(77.0f));
    std::vector<const std::byte*> pointers;
    for (const auto& input : inputs) pointers.push_back(reinterpret_cast<const std::byte*>(input.data()));
    reduce_inputs(reinterpret_cast<std::byte*>(out.data()), pointers, static_cast<int64_t>(count), dtype,
                  ReduceOp::kAvg);
    for (size_t i = 0; i < count; ++i) CHECK(same(expected(inputs, i, ReduceOp::kAvg), out[i]));
    CHECK(static_cast<float>(out[count]) == 77.0f);
  }
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"every fp16 is reduced as element by element",
       [] { every_number_is_reduced_as_element_by_element<c10::Half>(c10::ScalarType::Half); }},
      {"every bf16 is reduced as element by element",
       [] { every_number_is_reduced_as_element_by_element<c10::BFloat16>(c10::ScalarType::BFloat16); }},
      {"any number of fp16", [] { any_number_of_elements<c10::Half>(c10::ScalarType::Half); }},
      {"any number of bf16", [] { any_number_of_elements<c10::BFloat16>(c10::ScalarType::BFloat16); }},
  });
}
