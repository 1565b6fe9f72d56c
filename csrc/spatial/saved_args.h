#pragma once

#include <ATen/core/List.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// How an autograd node keeps the arguments of its op that are not tensors: numbers in one list of integers, beside it
// the names of the groups and one more name. A value each would cost a call of a small op a tenth of its time, and a
// tuple of lists has no hash, which compiled autograd asks for.
namespace torchtp::spatial {

using Ints = std::vector<int64_t>;
using Groups = c10::List<std::string>;

class ArgsWriter {
 public:
  explicit ArgsWriter(torch::autograd::AutogradContext* ctx) : ctx_(ctx) { numbers_.reserve(32); }
  void finish() { ctx_->saved_data.emplace("numbers", c10::IValue(std::move(numbers_))); }

  void put(int64_t value) { numbers_.push_back(value); }
  void put(bool value) { numbers_.push_back(value); }
  void put(double value) {
    int64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    numbers_.push_back(bits);
  }
  void put(const std::array<bool, 3>& values) {
    for (const bool value : values) put(value);
  }
  void put(const std::optional<int64_t>& value) {
    put(value.has_value());
    put(value.value_or(0));
  }
  template <typename T>
  void put(const std::vector<T>& values) {
    put(static_cast<int64_t>(values.size()));
    for (const T value : values) put(value);
  }
  void put(const Groups& groups) { ctx_->saved_data.emplace("groups", groups); }
  void put(const std::string& name) { ctx_->saved_data.emplace("name", name); }
  template <typename... Values>
  void put(const std::tuple<Values...>& values) {
    std::apply([&](const auto&... each) { (put(each), ...); }, values);
  }

 private:
  torch::autograd::AutogradContext* ctx_;
  Ints numbers_;
};

class ArgsReader {
 public:
  explicit ArgsReader(torch::autograd::AutogradContext* ctx)
      : ctx_(ctx), numbers_(ctx->saved_data["numbers"].toIntVector()) {}

  template <typename T>
  T take() {
    return take(static_cast<T*>(nullptr));
  }

 private:
  // The pointers only say the type.
  int64_t take(int64_t*) { return numbers_[next_++]; }
  bool take(bool*) { return numbers_[next_++] != 0; }
  double take(double*) {
    double value;
    std::memcpy(&value, &numbers_[next_++], sizeof(value));
    return value;
  }
  std::array<bool, 3> take(std::array<bool, 3>*) { return {take<bool>(), take<bool>(), take<bool>()}; }
  std::optional<int64_t> take(std::optional<int64_t>*) {
    const bool has_value = take<bool>();
    const int64_t value = take<int64_t>();
    return has_value ? std::optional<int64_t>(value) : std::nullopt;
  }
  template <typename T>
  std::vector<T> take(std::vector<T>*) {
    std::vector<T> values(static_cast<size_t>(take<int64_t>()));
    for (T& value : values) value = take<T>();
    return values;
  }
  Groups take(Groups*) { return c10::impl::toTypedList<std::string>(ctx_->saved_data["groups"].toList()); }
  std::string take(std::string*) { return ctx_->saved_data["name"].toStringRef(); }
  template <typename... Values>
  std::tuple<Values...> take(std::tuple<Values...>*) {
    return std::tuple<Values...>{take<Values>()...};  // braces: in this order
  }

  torch::autograd::AutogradContext* ctx_;
  Ints numbers_;
  size_t next_ = 0;
};

// Once for each node; at most one Groups and one string among the values.
template <typename... Values>
void save_args(torch::autograd::AutogradContext* ctx, const Values&... values) {
  ArgsWriter writer(ctx);
  (writer.put(values), ...);
  writer.finish();
}

// The values that were saved, by their types.
template <typename... Values>
std::tuple<Values...> load_args(torch::autograd::AutogradContext* ctx) {
  return ArgsReader(ctx).take<std::tuple<Values...>>();
}

}  // namespace torchtp::spatial
