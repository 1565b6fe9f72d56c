#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/sqrt.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

namespace torchtp::spatial {

// Numbers in double precision, [rows, columns]: the statistics and factors of a norm. On the CPU plain memory, because
// a tensor op on so few numbers costs many times the work itself; on other devices a float64 tensor.
class Numbers {
 public:
  Numbers() = default;
  Numbers(int64_t rows, int64_t columns) : rows_(rows), columns_(columns), values_(rows * columns) {}
  // Of a tensor [columns] or [rows, columns] of any floating type.
  explicit Numbers(const at::Tensor& tensor);
  // One value [rows, columns] times, where `like` lies.
  static Numbers filled(int64_t rows, int64_t columns, double value, const Numbers& like);
  // Columns side by side; all have the same number of rows.
  static Numbers join(std::initializer_list<Numbers> parts);

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t size() const { return rows_ * columns_; }

  Numbers view(int64_t rows, int64_t columns) const;
  Numbers columns(int64_t first, int64_t count) const;
  Numbers sum_rows() const;  // [1, columns]
  // Columns are members of groups, those of a group side by side.
  Numbers sum_members(int64_t num_groups) const;          // [rows, num_groups]
  Numbers repeat_for_members(int64_t num_members) const;  // [rows, columns * num_members]
  Numbers by_member(int64_t num_groups) const;            // [members of a group, rows * num_groups]

  at::Tensor to_tensor(at::ScalarType type, at::IntArrayRef sizes) const;
  // Into an existing tensor of as many elements.
  void write(const at::Tensor& tensor) const;

  bool on_cpu() const { return !tensor_.defined(); }
  // On the CPU. A single row or column stands for as many as are asked for.
  double at(int64_t row, int64_t column) const {
    return values_[(rows_ == 1 ? 0 : row) * columns_ + (columns_ == 1 ? 0 : column)];
  }
  double* data() { return values_.data(); }
  template <typename T>
  std::vector<T> expanded(int64_t rows, int64_t columns) const {
    std::vector<T> out(rows * columns);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        out[row * columns + column] = static_cast<T>(at(row, column));
      }
    }
    return out;
  }
  // Not on the CPU.
  const at::Tensor& tensor() const { return tensor_; }

 private:
  int64_t rows_ = 0, columns_ = 0;
  std::vector<double> values_;
  at::Tensor tensor_;
};

// Of two extents that broadcast.
inline int64_t common(int64_t a, int64_t b) { return a == 1 ? b : a; }

// f of the numbers at each place: a lambda of `auto` arguments that serves doubles and tensors alike. Single rows and
// columns go with any number of them.
template <typename F, typename... Others>
Numbers map(const F& f, const Numbers& first, const Others&... others) {
  if (!first.on_cpu()) return Numbers(f(first.tensor(), others.tensor()...));
  int64_t rows = first.rows(), columns = first.columns();
  ((rows = common(rows, others.rows()), columns = common(columns, others.columns())), ...);
  Numbers out(rows, columns);
  double* next = out.data();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) *next++ = f(first.at(row, column), others.at(row, column)...);
  }
  return out;
}

// What such lambdas need beside operators.
inline double at_least(double x, double least) { return std::max(x, least); }
inline at::Tensor at_least(const at::Tensor& x, double least) { return at::clamp_min(x, least); }
inline double inverse_root(double x) { return 1 / std::sqrt(x); }
inline at::Tensor inverse_root(const at::Tensor& x) { return at::sqrt(x).reciprocal_(); }

inline Numbers product(const Numbers& a, const Numbers& b) {
  return map([](const auto& x, const auto& y) { return x * y; }, a, b);
}
inline Numbers quotient(const Numbers& a, const Numbers& b) {
  return map([](const auto& x, const auto& y) { return x / y; }, a, b);
}

}  // namespace torchtp::spatial
