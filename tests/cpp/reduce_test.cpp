// Reductions of floating-point numbers, by each set of instructions that this processor has, against the same by c10's
// conversions, one element at a time.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstring>
#include <random>

#include "check.h"
#include "collectives/reduce_op.h"
#include "collectives/reduce_simd.h"

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

// As reduce_inputs() does it, and by all instructions for these numbers.
std::vector<SimdReduction*> ways(c10::ScalarType dtype) {
  std::vector<SimdReduction*> found;
  for (SimdReduction* const way : simd_reductions()) {
    if (way(Outputs({}), {}, 0, dtype, ReduceOp::kSum, 1)) found.push_back(way);
  }
  found.push_back([](const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count,
                     c10::ScalarType dtype, ReduceOp op, int) {
    reduce_inputs(outputs, inputs, count, dtype, op);
    return true;
  });
  return found;
}

template <typename T>
std::byte* bytes_of(std::vector<T>& numbers) {
  return reinterpret_cast<std::byte*>(numbers.data());
}

template <typename T>
std::vector<const std::byte*> pointers_to(const std::vector<std::vector<T>>& inputs) {
  std::vector<const std::byte*> pointers;
  for (const auto& input : inputs) pointers.push_back(reinterpret_cast<const std::byte*>(input.data()));
  return pointers;
}

// Every bit pattern of 16 bits (of fp32: random ones), combined with others of any size, into a buffer of its own, into
// the last input, into all inputs and another.
template <typename T>
void every_number_is_reduced_as_element_by_element(c10::ScalarType dtype) {
  std::mt19937 random(1);
  constexpr size_t kCount = 65536;
  for (const size_t num_inputs : {1, 2, 3, 4}) {
    std::vector<std::vector<T>> inputs(num_inputs, std::vector<T>(kCount));
    for (size_t i = 0; i < kCount; ++i) {
      for (size_t r = 0; r < num_inputs; ++r) {
        const auto bits = static_cast<uint32_t>(r == 0 && sizeof(T) == 2 ? i : random());
        std::memcpy(&inputs[r][i], &bits, sizeof(T));
      }
    }
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      for (SimdReduction* const way : ways(dtype)) {
        for (const size_t first : {num_inputs, num_inputs - 1, size_t{0}}) {
          auto buffers = inputs;
          const auto sources = pointers_to(buffers);
          buffers.emplace_back(kCount);
          std::vector<std::byte*> outputs;
          const size_t end = first == num_inputs - 1 ? num_inputs : num_inputs + 1;
          for (size_t k = first; k < end; ++k) outputs.push_back(bytes_of(buffers[k]));
          CHECK(way(Outputs(outputs), sources, kCount, dtype, op, static_cast<int>(num_inputs)));
          for (size_t k = first; k < end; ++k) {
            for (size_t i = 0; i < kCount; ++i) CHECK(same(expected(inputs, i, op), buffers[k][i]));
          }
        }
      }
    }
  }
}

// What is left over of whole vectors: not a byte beyond the end is read or written.
template <typename T>
void any_number_of_elements(c10::ScalarType dtype) {
  for (size_t count = 0; count <= 300; ++count) {
    std::vector<std::vector<T>> inputs(3, std::vector<T>(count));
    for (size_t r = 0; r < 3; ++r) {
      for (size_t i = 0; i < count; ++i) inputs[r][i] = static_cast<T>(static_cast<float>(r * 50 + i) / 8);
    }
    for (SimdReduction* const way : ways(dtype)) {
      std::vector<T> out(count + 1, static_cast<T>(77.0f));
      std::byte* const bytes = bytes_of(out);
      CHECK(way(Outputs(bytes), pointers_to(inputs), static_cast<int64_t>(count), dtype, ReduceOp::kAvg, 3));
      for (size_t i = 0; i < count; ++i) CHECK(same(expected(inputs, i, ReduceOp::kAvg), out[i]));
      CHECK(static_cast<float>(out[count]) == 77.0f);
    }
  }
}

// Partial sums of several hosts are divided by the ranks of all.
void an_average_is_over_as_many_as_are_told() {
  const std::vector<std::vector<float>> inputs = {std::vector<float>(200, 10.0f), std::vector<float>(200, 5.0f)};
  std::vector<float> out(200);
  reduce_inputs(bytes_of(out), pointers_to(inputs), 200, c10::ScalarType::Float, ReduceOp::kAvg, 6);
  for (const float value : out) CHECK_EQUAL(value, 2.5f);
}

// Those that no vector instructions of ours reduce.
void integers_go_to_all_outputs() {
  std::vector<std::vector<int32_t>> buffers(3, std::vector<int32_t>(3000));
  for (int32_t i = 0; i < 3000; ++i) {
    for (int32_t r = 0; r < 3; ++r) buffers[r][i] = (r + 1) * i;
  }
  const auto inputs = pointers_to(buffers);
  std::vector<std::byte*> outputs;
  for (auto& buffer : buffers) outputs.push_back(bytes_of(buffer));
  reduce_inputs(Outputs(outputs), inputs, 3000, c10::ScalarType::Int, ReduceOp::kSum);
  for (const auto& buffer : buffers) {
    for (int32_t i = 0; i < 3000; ++i) CHECK_EQUAL(buffer[i], 6 * i);
  }
}

// Bytes of a tensor of bool that is a view of another dtype.
void any_byte_but_zero_is_true() {
  const std::vector<std::vector<uint8_t>> inputs = {{0, 0, 2, 2, 2}, {0, 4, 0, 1, 2}};
  const auto reduced = [&](ReduceOp op) {
    std::vector<uint8_t> out(5);
    reduce_inputs(bytes_of(out), pointers_to(inputs), 5, c10::ScalarType::Bool, op);
    return out;
  };
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor}) {
    CHECK((reduced(op) == std::vector<uint8_t>{0, 1, 1, 1, 1}));
  }
  for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand}) {
    CHECK((reduced(op) == std::vector<uint8_t>{0, 0, 0, 1, 1}));
  }
  CHECK((reduced(ReduceOp::kBxor) == std::vector<uint8_t>{0, 1, 1, 0, 0}));
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"every fp16 is reduced as element by element",
       [] { every_number_is_reduced_as_element_by_element<c10::Half>(c10::ScalarType::Half); }},
      {"every bf16 is reduced as element by element",
       [] { every_number_is_reduced_as_element_by_element<c10::BFloat16>(c10::ScalarType::BFloat16); }},
      {"fp32 is reduced as element by element",
       [] { every_number_is_reduced_as_element_by_element<float>(c10::ScalarType::Float); }},
      {"any number of fp16", [] { any_number_of_elements<c10::Half>(c10::ScalarType::Half); }},
      {"any number of bf16", [] { any_number_of_elements<c10::BFloat16>(c10::ScalarType::BFloat16); }},
      {"any number of fp32", [] { any_number_of_elements<float>(c10::ScalarType::Float); }},
      {"integers go to all outputs", integers_go_to_all_outputs},
      {"any byte but zero is true", any_byte_but_zero_is_true},
      {"an average is over as many as are told", an_average_is_over_as_many_as_are_told},
  });
}
