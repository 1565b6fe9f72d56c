#include "collectives/reduce_op.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <complex>
#include <cstring>
#include <string>
#include <type_traits>

#include "collectives/reduce_simd.h"
#include "core/error.h"

namespace torchtp::collectives {

namespace {

// Partial results of one block stay in the first-level cache.
constexpr int64_t kBlock = 1024;

// As much stays in the second-level cache until it has been copied to all outputs.
constexpr size_t kCopiedBytes = 64 * 1024;

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<std::complex<T>> : std::true_type {};

template <typename T>
constexpr bool kIs16BitFloat = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

// What T is accumulated in. Integers wrap around in their own width, so the unsigned type does it without overflow.
template <typename T>
using Accumulator = std::conditional_t<kIs16BitFloat<T>, float, T>;

struct Sum {
  template <typename A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <typename A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      // 64 bits: narrower unsigned types would be promoted to int, whose product may overflow.
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else if constexpr (IsComplex<A>::value) {
      return A(a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real());
    } else {
      return a * b;
    }
  }
};

struct Min {
  template <typename A>
  static A apply(A a, A b) {
    return (a < b || a != a) ? a : b;
  }
};

struct Max {
  template <typename A>
  static A apply(A a, A b) {
    return (a > b || a != a) ? a : b;
  }
};

struct Band {
  template <typename A>
  static A apply(A a, A b) {
    return static_cast<A>(a & b);
  }
};

struct Bor {
  template <typename A>
  static A apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};

struct Bxor {
  template <typename A>
  static A apply(A a, A b) {
    return static_cast<A>(a ^ b);
  }
};

struct Keep {
  template <typename A>
  A operator()(A value) const {
    return value;
  }
};

template <typename A>
struct DivideBy {
  A divisor;
  A operator()(A value) const { return value / divisor; }
};

// acc = a op b; each loop below has no dependence between its iterations even where out is an input.
template <typename Op, typename T, typename A, typename Finish>
void reduce_block(T* out, const std::vector<const std::byte*>& inputs, int64_t begin, int64_t count, Finish finish) {
  A acc[kBlock];
  const size_t num_inputs = inputs.size();
  const auto input = [&](size_t r) { return reinterpret_cast<const T*>(inputs[r]) + begin; };
  const T* a = input(0);
  if (num_inputs == 1) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(finish(static_cast<A>(a[i])));
    return;
  }
  const T* b = input(1);
  if (num_inputs == 2) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<T>(finish(Op::template apply<A>(static_cast<A>(a[i]), static_cast<A>(b[i]))));
    }
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) acc[i] = Op::template apply<A>(static_cast<A>(a[i]), static_cast<A>(b[i]));
  for (size_t r = 2; r + 1 < num_inputs; ++r) {
    const T* c = input(r);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) acc[i] = Op::template apply<A>(acc[i], static_cast<A>(c[i]));
  }
  const T* last = input(num_inputs - 1);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<T>(finish(Op::template apply<A>(acc[i], static_cast<A>(last[i]))));
  }
}

template <typename Op, typename T, typename A = Accumulator<T>, typename Finish = Keep>
void reduce_typed(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, Finish finish = {}) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    reduce_block<Op, T, A>(reinterpret_cast<T*>(out) + begin, inputs, begin, std::min(kBlock, count - begin), finish);
  }
}

// Of truth values as torch reads them: true is any byte but 0 coming in (of what was a view), and 1 going out.
template <typename Op>
struct OfTruths {
  template <typename A>
  static A apply(A a, A b) {
    return Op::template apply<A>(a != 0, b != 0);
  }
};

void reduce_bool(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor:
      return reduce_typed<OfTruths<Bor>, uint8_t>(out, inputs, count);
    case ReduceOp::kBxor:
      return reduce_typed<OfTruths<Bxor>, uint8_t>(out, inputs, count);
    default:
      return reduce_typed<OfTruths<Band>, uint8_t>(out, inputs, count);
  }
}

template <typename T>
void reduce_as(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, ReduceOp op, int divisor) {
  // The sum behind an integer average must not wrap around in a narrow type.
  using Wide = std::conditional_t<std::is_integral_v<T>, int64_t, Accumulator<T>>;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kPremulSum:
      return reduce_typed<Sum, T>(out, inputs, count);
    case ReduceOp::kAvg:
      return reduce_typed<Sum, T, Wide>(out, inputs, count, DivideBy<Wide>{static_cast<Wide>(divisor)});
    case ReduceOp::kProduct:
      return reduce_typed<Product, T>(out, inputs, count);
    default:
      break;
  }
  if constexpr (!IsComplex<T>::value) {
    if (op == ReduceOp::kMin) return reduce_typed<Min, T>(out, inputs, count);
    if (op == ReduceOp::kMax) return reduce_typed<Max, T>(out, inputs, count);
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kBand) return reduce_typed<Band, T>(out, inputs, count);
    if (op == ReduceOp::kBor) return reduce_typed<Bor, T>(out, inputs, count);
    if (op == ReduceOp::kBxor) return reduce_typed<Bxor, T>(out, inputs, count);
  }
  throw Error(std::string("reduce op ") + name_of(op) + " has no meaning for this dtype");
}

void reduce_scalars(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, c10::ScalarType dtype,
                    ReduceOp op, int divisor) {
  switch (dtype) {
    case c10::ScalarType::Bool:
      return reduce_bool(out, inputs, count, op);
    case c10::ScalarType::Byte:
      return reduce_as<uint8_t>(out, inputs, count, op, divisor);
    case c10::ScalarType::Char:
      return reduce_as<int8_t>(out, inputs, count, op, divisor);
    case c10::ScalarType::Short:
      return reduce_as<int16_t>(out, inputs, count, op, divisor);
    case c10::ScalarType::Int:
      return reduce_as<int32_t>(out, inputs, count, op, divisor);
    case c10::ScalarType::Long:
      return reduce_as<int64_t>(out, inputs, count, op, divisor);
    case c10::ScalarType::Half:
      return reduce_as<c10::Half>(out, inputs, count, op, divisor);
    case c10::ScalarType::BFloat16:
      return reduce_as<c10::BFloat16>(out, inputs, count, op, divisor);
    case c10::ScalarType::Float:
      return reduce_as<float>(out, inputs, count, op, divisor);
    case c10::ScalarType::Double:
      return reduce_as<double>(out, inputs, count, op, divisor);
    case c10::ScalarType::ComplexFloat:
      return reduce_as<std::complex<float>>(out, inputs, count, op, divisor);
    case c10::ScalarType::ComplexDouble:
      return reduce_as<std::complex<double>>(out, inputs, count, op, divisor);
    default:
      throw Error(std::string("dtype ") + c10::toString(dtype) + " cannot be reduced");
  }
}

}  // namespace

const char* name_of(ReduceOp op) {
  static constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "none";
}

bool is_reducible(c10::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case c10::ScalarType::Bool:
      return op != ReduceOp::kAvg && op != ReduceOp::kPremulSum;
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return op != ReduceOp::kPremulSum;
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
      return op != ReduceOp::kBand && op != ReduceOp::kBor && op != ReduceOp::kBxor;
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
      return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kProduct || op == ReduceOp::kPremulSum;
    case c10::ScalarType::ComplexHalf:
      return op == ReduceOp::kSum || op == ReduceOp::kAvg;
    default:
      return false;
  }
}

void reduce_inputs(std::byte* out, const std::vector<const std::byte*>& inputs, int64_t count, c10::ScalarType dtype,
                   ReduceOp op, int divisor) {
  reduce_inputs(Outputs(out), inputs, count, dtype, op, divisor);
}

void reduce_inputs(const Outputs& outputs, const std::vector<const std::byte*>& inputs, int64_t count,
                   c10::ScalarType dtype, ReduceOp op, int divisor) {
  if (count == 0 || inputs.empty()) return;
  if (divisor == 0) divisor = static_cast<int>(inputs.size());
  if (dtype == c10::ScalarType::ComplexHalf) {  // its sums and averages are those of its halves
    return reduce_inputs(outputs, inputs, 2 * count, c10::ScalarType::Half, op, divisor);
  }
  if (reduce_simd(outputs, inputs, count, dtype, op, divisor)) return;
  std::byte* const first = *outputs.begin();
  const size_t num_bytes = static_cast<size_t>(count) * c10::elementSize(dtype);
  std::vector<const std::byte*> block(inputs);
  for (size_t begin = 0; begin < num_bytes; begin += kCopiedBytes) {
    const size_t size = std::min(kCopiedBytes, num_bytes - begin);
    for (size_t r = 0; r < inputs.size(); ++r) block[r] = inputs[r] + begin;
    reduce_scalars(first + begin, block, static_cast<int64_t>(size / c10::elementSize(dtype)), dtype, op, divisor);
    for (std::byte* const out : outputs) {
      if (out != first) std::memcpy(out + begin, first + begin, size);
    }
  }
}

ReduceOp partial_op(ReduceOp op) { return op == ReduceOp::kAvg || op == ReduceOp::kPremulSum ? ReduceOp::kSum : op; }

c10::ScalarType partial_dtype(c10::ScalarType dtype, ReduceOp op) {
  const bool half = dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16;
  if (half && op != ReduceOp::kMin && op != ReduceOp::kMax) return c10::ScalarType::Float;
  if (dtype == c10::ScalarType::ComplexHalf) return c10::ScalarType::ComplexFloat;
  if (op == ReduceOp::kAvg && c10::isIntegralType(dtype, false)) return c10::ScalarType::Long;
  return dtype;
}

}  // namespace torchtp::collectives
