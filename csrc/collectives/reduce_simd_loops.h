#pragma once

// For a file that has defined TORCHTP_TARGET, the instructions it may use, and TORCHTP_VECTOR, the same for what is
// always inlined: `reduce_floats<V>()` and `reduce_format<V, Format<V>>()`, V being what that file says of its vectors.
//
// Everything between the loads of a number and its store stays in registers. Compilers do not see through the
// conversions of c10::Half and c10::BFloat16, element by element they take several times as long as the memory.

#include <algorithm>
#include <cstring>

#include "collectives/reduce_simd.h"

namespace torchtp::collectives {
namespace {

// Of each kind, inputs and outputs: the ranks of a group. More, over hosts, are few bytes each.
constexpr int kMostStreams = 64;

// Twice V::kLanes numbers in fp32; which of the two holds which is the format's affair.
template <typename V>
struct Wide {
  typename V::Floats a, b;
};

template <typename V>
struct Fp32 {
  using Number = float;
  TORCHTP_VECTOR static Wide<V> load(const float* in) { return {V::load(in), V::load(in + V::kLanes)}; }
  using Result = Wide<V>;
  template <int64_t kNum>
  TORCHTP_VECTOR static void round(const Wide<V> (&values)[kNum], Result (&results)[kNum]) {
    for (int64_t u = 0; u < kNum; ++u) results[u] = values[u];
  }
  TORCHTP_VECTOR static void store(float* out, const Result& value) {
    V::store(out, value.a);
    V::store(out + V::kLanes, value.b);
  }
};

template <typename V>
struct Fp16 {
  using Number = uint16_t;
  TORCHTP_VECTOR static Wide<V> load(const uint16_t* in) { return {V::load_fp16(in), V::load_fp16(in + V::kLanes)}; }
  struct Result {
    decltype(V::round_fp16(typename V::Floats())) a, b;
  };
  template <int64_t kNum>
  TORCHTP_VECTOR static void round(const Wide<V> (&values)[kNum], Result (&results)[kNum]) {
    for (int64_t u = 0; u < kNum; ++u) results[u] = {V::round_fp16(values[u].a), V::round_fp16(values[u].b)};
  }
  TORCHTP_VECTOR static void store(uint16_t* out, const Result& value) {
    V::store_fp16(out, value.a);
    V::store_fp16(out + V::kLanes, value.b);
  }
};

template <typename V>
struct Bf16 {
  using Number = uint16_t;
  // a: the even ones, b: the odd ones. So they never have to change places.
  TORCHTP_VECTOR static Wide<V> load(const uint16_t* in) {
    const auto both = V::load_bits(in);
    return {V::even_bf16(both), V::odd_bf16(both)};
  }
  using Result = typename V::Bits;
  template <int64_t kNum>
  TORCHTP_VECTOR static void round(const Wide<V> (&values)[kNum], Result (&results)[kNum]) {
    auto hard = V::hard_for_bf16(values[0].a, values[0].b);
    for (int64_t u = 1; u < kNum; ++u) hard |= V::hard_for_bf16(values[u].a, values[u].b);
    if (__builtin_expect(hard != 0, 0)) {
      for (int64_t u = 0; u < kNum; ++u) results[u] = V::pair_any_bf16(values[u].a, values[u].b);
    } else {
      for (int64_t u = 0; u < kNum; ++u) results[u] = V::pair_bf16(values[u].a, values[u].b);
    }
  }
  TORCHTP_VECTOR static void store(uint16_t* out, const Result& value) { V::store_bits(out, value); }
};

struct Sum {
  template <typename V>
  TORCHTP_VECTOR static auto apply(typename V::Floats a, typename V::Floats b) {
    return V::add(a, b);
  }
};

struct Product {
  template <typename V>
  TORCHTP_VECTOR static auto apply(typename V::Floats a, typename V::Floats b) {
    return V::multiply(a, b);
  }
};

// a where it is the smaller (larger) one or NaN.
template <bool kSmaller>
struct Select {
  template <typename V>
  TORCHTP_VECTOR static auto apply(typename V::Floats a, typename V::Floats b) {
    return V::template select<kSmaller>(a, b);
  }
};

// Where the numbers come from and go to. A copy on the stack, which no store of numbers can be taken to change; and
// with the numbers of both known beforehand there are no loops over them: for two ranks 0.6 to 0.8 of the time
// together.
template <int kInputs = 0, int kOutputs = 0>
struct Streams {
  const std::byte* inputs[kInputs == 0 ? kMostStreams : kInputs];
  std::byte* outputs[kOutputs == 0 ? kMostStreams : kOutputs];
  int inputs_told, outputs_told;
  Streams(const Outputs& to, const std::vector<const std::byte*>& from)
      : inputs_told(static_cast<int>(from.size())), outputs_told(static_cast<int>(to.end() - to.begin())) {
    std::copy(from.begin(), from.end(), inputs);
    std::copy(to.begin(), to.end(), outputs);
  }
  int num_inputs() const { return kInputs == 0 ? inputs_told : kInputs; }
  int num_outputs() const { return kOutputs == 0 ? outputs_told : kOutputs; }
};

template <typename V, typename Format, typename Op>
class Loop {
  using Number = typename Format::Number;
  static constexpr int64_t kLanes = 2 * V::kLanes;
  static constexpr int64_t kUnrolled = 4;  // the loop over the inputs would else cost as much as what it does
  static constexpr int64_t kStep = kUnrolled * kLanes;
  // What the processor foresees of several inputs keeps the memory busy with half of what it could give: without the
  // request a sum of 25 MB takes 1.15 times as long for 2 ranks, one of as many bytes of bf16 1.4 times for 4.
  static constexpr int64_t kAhead = 3072 / sizeof(Number);
  static constexpr int64_t kLine = 64 / sizeof(Number);

 public:
  static void run(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count, int divisor) {
    const int64_t num_outputs = outputs.end() - outputs.begin();
    if (inputs.size() == 2 && num_outputs == 2) return run(Streams<2, 2>(outputs, inputs), count, divisor);
    if (inputs.size() == 2 && num_outputs == 1) return run(Streams<2, 1>(outputs, inputs), count, divisor);
    run(Streams<>(outputs, inputs), count, divisor);
  }

 private:
  template <typename Streams>
  TORCHTP_TARGET static void run(const Streams streams, int64_t count, int divisor) {
    int64_t i = 0;
    // Not past the end: there another rank is at work on what its cache holds.
    const int64_t far = count - kAhead;
    for (; i + kStep <= far; i += kStep) step<true>(streams, i, divisor);
    for (; i + kStep <= count; i += kStep) step<false>(streams, i, divisor);
    // The rest by the same instructions, so that a result does not depend on where its element lies.
    for (; i < count; i += kLanes) {
      const size_t num_bytes = static_cast<size_t>(std::min(kLanes, count - i)) * sizeof(Number);
      Number rest[kLanes] = {};
      Wide<V> value[1] = {};
      for (int r = 0; r < streams.num_inputs(); ++r) {
        std::memcpy(rest, numbers(streams.inputs[r]) + i, num_bytes);
        value[0] = r == 0 ? Format::load(rest) : apply(value[0], Format::load(rest));
      }
      value[0] = finish(value[0], divisor);
      typename Format::Result result[1];
      Format::round(value, result);
      Format::store(rest, result[0]);
      for (int r = 0; r < streams.num_outputs(); ++r) std::memcpy(numbers(streams.outputs[r]) + i, rest, num_bytes);
    }
  }

  static const Number* numbers(const std::byte* bytes) { return reinterpret_cast<const Number*>(bytes); }
  static Number* numbers(std::byte* bytes) { return reinterpret_cast<Number*>(bytes); }
  TORCHTP_VECTOR static void request(const Number* in) {
    for (int64_t line = 0; line < kStep; line += kLine) __builtin_prefetch(in + line);
  }
  template <bool kFar, typename Streams>
  TORCHTP_VECTOR static void step(const Streams& streams, int64_t i, int divisor) {
    Wide<V> value[kUnrolled];
    const Number* in = numbers(streams.inputs[0]) + i;
    if constexpr (kFar) request(in + kAhead);
    for (int64_t u = 0; u < kUnrolled; ++u) value[u] = Format::load(in + u * kLanes);
    for (int r = 1; r < streams.num_inputs(); ++r) {
      in = numbers(streams.inputs[r]) + i;
      if constexpr (kFar) request(in + kAhead);
      for (int64_t u = 0; u < kUnrolled; ++u) value[u] = apply(value[u], Format::load(in + u * kLanes));
    }
    typename Format::Result result[kUnrolled];
    for (int64_t u = 0; u < kUnrolled; ++u) value[u] = finish(value[u], divisor);
    Format::round(value, result);
    for (int r = 0; r < streams.num_outputs(); ++r) {
      Number* const out = numbers(streams.outputs[r]) + i;
      for (int64_t u = 0; u < kUnrolled; ++u) Format::store(out + u * kLanes, result[u]);
    }
  }
  TORCHTP_VECTOR static Wide<V> apply(const Wide<V>& x, const Wide<V>& y) {
    return {Op::template apply<V>(x.a, y.a), Op::template apply<V>(x.b, y.b)};
  }
  TORCHTP_VECTOR static Wide<V> finish(const Wide<V>& x, int divisor) {
    if (divisor == 1) return x;
    const auto all = V::broadcast(static_cast<float>(divisor));
    return {V::divide(x.a, all), V::divide(x.b, all)};
  }
};

template <typename V, typename Format>
bool reduce_format(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count, ReduceOp op,
                   int divisor) {
  if (inputs.size() > kMostStreams || outputs.end() - outputs.begin() > kMostStreams) return false;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum:
      Loop<V, Format, Sum>::run(outputs, inputs, count, 1);
      return true;
    case ReduceOp::kAvg:
      Loop<V, Format, Sum>::run(outputs, inputs, count, divisor);
      return true;
    case ReduceOp::kProduct:
      Loop<V, Format, Product>::run(outputs, inputs, count, 1);
      return true;
    case ReduceOp::kMin:
      Loop<V, Format, Select<true>>::run(outputs, inputs, count, 1);
      return true;
    case ReduceOp::kMax:
      Loop<V, Format, Select<false>>::run(outputs, inputs, count, 1);
      return true;
    default:
      return false;
  }
}

// fp16 by vectors of its own, where they differ.
template <typename V, typename VFp16 = V>
bool reduce_floats(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count,
                   c10::ScalarType dtype, ReduceOp op, int divisor) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce_format<V, Fp32<V>>(outputs, inputs, count, op, divisor);
    case c10::ScalarType::Half:
      return reduce_format<VFp16, Fp16<VFp16>>(outputs, inputs, count, op, divisor);
    case c10::ScalarType::BFloat16:
      return reduce_format<V, Bf16<V>>(outputs, inputs, count, op, divisor);
    default:
      return false;
  }
}

}  // namespace
}  // namespace torchtp::collectives
