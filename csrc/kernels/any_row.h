#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

#include "core/host_device.h"

namespace torchtp::kernels {

enum class NumberType : int32_t { kFloat, kDouble, kHalf, kBFloat16 };

// A few numbers as whoever owns them keeps them: of a type that a small kernel asks for where it reads them, so that it
// is compiled once. Null: not there. Void is void or const void.
template <typename Void>
struct AnyRow {
  Void* data = nullptr;
  NumberType type = NumberType::kFloat;

  TORCHTP_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  TORCHTP_HOST_DEVICE double load(int64_t i) const {
    if (type == NumberType::kFloat) return at<float>(i);
    if (type == NumberType::kDouble) return at<double>(i);
    if (type == NumberType::kHalf) return static_cast<float>(at<c10::Half>(i));
    return static_cast<float>(at<c10::BFloat16>(i));
  }
  TORCHTP_HOST_DEVICE double load_or(int64_t i, double otherwise) const { return data ? load(i) : otherwise; }
  TORCHTP_HOST_DEVICE void store(int64_t i, double value) const {
    if (type == NumberType::kFloat) {
      at<float>(i) = static_cast<float>(value);
    } else if (type == NumberType::kDouble) {
      at<double>(i) = value;
    } else if (type == NumberType::kHalf) {
      at<c10::Half>(i) = static_cast<c10::Half>(static_cast<float>(value));
    } else {
      at<c10::BFloat16>(i) = static_cast<c10::BFloat16>(static_cast<float>(value));
    }
  }

 private:
  template <typename T>
  TORCHTP_HOST_DEVICE auto& at(int64_t i) const {
    using Number = std::conditional_t<std::is_const_v<Void>, const T, T>;
    return static_cast<Number*>(data)[i];
  }
};

}  // namespace torchtp::kernels
