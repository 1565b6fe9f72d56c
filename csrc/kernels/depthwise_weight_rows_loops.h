#pragma once

// For a file that has defined TORCHTP_TARGET, the instructions it may use, and TORCHTP_VECTOR, the same for what is
// always inlined: `DepthwiseWeightRows<V, T>`, V being what that file says of its vectors.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels/depthwise_weight_rows.h"

// What a template is instantiated for.
#define TORCHTP_FOR_EACH_NUMBER(INSTANTIATE) \
  INSTANTIATE(double)                        \
  INSTANTIATE(float)                         \
  INSTANTIATE(c10::BFloat16)                 \
  INSTANTIATE(c10::Half)

namespace torchtp::kernels {
namespace {

// Taps that share what is loaded. Sums of 3 rows x 3 taps or 2 x 4, the inputs and a gradient stay in 16 registers.
constexpr int kMostTaps = 4;
constexpr int most_rows(int taps) { return taps < kMostTaps ? 3 : 2; }
// Rows of the input after which the sums, in fp32, are added to the totals.
constexpr int64_t kRowsOfSums = 64;

template <typename V, typename T>
class DepthwiseWeightRows {
 public:
  using Number = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using Vector = std::conditional_t<std::is_same_v<T, double>, typename V::Doubles, typename V::Floats>;
  static constexpr int64_t kLanes = sizeof(Vector) / sizeof(Number);

  explicit DepthwiseWeightRows(const DepthwiseParams& params)
      : p_(params),
        // Channels last: a vector is kLanes channels of one position. Channels first: kLanes positions of one channel.
        width_(params.channels_last ? kLanes : 1),
        vectors_(params.channels_last ? params.out_width : (params.out_width + kLanes - 1) / kLanes),
        positions_(vectors_ * kLanes / width_),
        phase_(positions_ + params.x.reach() / params.x.stride + 1),
        ring_(params.y.reach() / params.y.stride + 1),
        taps_(int64_t{params.y.kernel} * params.x.kernel),
        in_row_(phase_ * params.x.stride * width_),
        grad_rows_(ring_ * vectors_ * kLanes),
        sums_(taps_ * kLanes),
        totals_(taps_ * kLanes),
        joined_(params.y.kernel) {}

  TORCHTP_TARGET void run(const T* in, const T* grad_out, T* grad_weight, int64_t first, int64_t last) {
    for (int64_t channel = first; channel < last; channel += width_) {
      const int64_t channels = std::min(width_, last - channel);
      std::fill(totals_.begin(), totals_.end(), 0.0);
      for (int64_t n = 0; n < p_.batches; ++n) {
        if (p_.channels_last) {
          image(in + n * p_.in_height * p_.in_width * p_.channels + channel,
                grad_out + n * p_.out_height * p_.out_width * p_.channels + channel, channels);
        } else {
          const int64_t plane = n * p_.channels + channel;
          image(in + plane * p_.in_height * p_.in_width, grad_out + plane * p_.out_height * p_.out_width, channels);
        }
      }
      for (int64_t i = 0; i < channels; ++i) {
        for (int64_t tap = 0; tap < taps_; ++tap) grad_weight[(channel + i) * taps_ + tap] = total(tap, i);
      }
    }
  }

 private:
  T total(int64_t tap, int64_t channel) const {
    const double* const lanes = totals_.data() + tap * kLanes;
    if (p_.channels_last) return static_cast<T>(lanes[channel]);
    double sum = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    return static_cast<T>(sum);
  }

  TORCHTP_TARGET void image(const T* in, const T* grad_out, int64_t channels) {
    const int64_t step = p_.channels_last ? p_.channels : 1;
    int64_t next = 0;  // the first row of the gradient that is not in the ring yet
    for (int64_t begin = 0; begin < p_.in_height; begin += kRowsOfSums) {
      std::fill(sums_.begin(), sums_.end(), Number(0));
      for (int64_t row = begin; row < std::min<int64_t>(begin + kRowsOfSums, p_.in_height); ++row) {
        const int count = joined(row);
        if (count == 0) continue;
        lay_input(in + row * p_.in_width * step, channels);
        // No row from here on meets an earlier one of the gradient.
        const int64_t least = std::max<int64_t>(row + p_.y.offset - p_.y.reach(), 0);
        next = std::max(next, (least + p_.y.stride - 1) / p_.y.stride);
        for (; next <= joined_[0].grad_row; ++next) lay_gradient(grad_out + next * p_.out_width * step, next, channels);
        meet(count);
      }
      for (int64_t i = 0; i < taps_ * kLanes; ++i) totals_[i] += sums_[i];
    }
  }

  // Rows of the gradient that meet a row of the input, by tap and so the last one first; how many there are.
  int joined(int64_t row) {
    int count = 0;
    for (int64_t tap = 0; tap < p_.y.kernel; ++tap) {
      const int64_t reached = row + p_.y.offset - tap * p_.y.dilation;
      if (reached < 0) break;
      if (reached % p_.y.stride != 0 || reached / p_.y.stride >= p_.out_height) continue;
      joined_[count++] = {tap, reached / p_.y.stride};
    }
    return count;
  }

  // Position j of phase r is column stride * j + r - offset, zero outside.
  TORCHTP_TARGET void lay_input(const T* row, int64_t channels) {
    const int64_t stride = p_.x.stride;
    for (int64_t r = 0; r < stride; ++r) {
      const int64_t shift = r - p_.x.offset;
      const int64_t begin = std::clamp<int64_t>((-shift + stride - 1) / stride, 0, phase_);
      const int64_t end = std::clamp<int64_t>((p_.in_width - shift + stride - 1) / stride, begin, phase_);
      lay(row, stride, shift, begin, end, phase_, channels, in_row_.data() + r * phase_ * width_);
    }
  }

  TORCHTP_TARGET void lay_gradient(const T* row, int64_t index, int64_t channels) {
    lay(row, 1, 0, 0, p_.out_width, positions_, channels, gradient(index));
  }

  // Positions `begin` to `end` of `count`, of columns stride * position + shift; zeros before and after.
  TORCHTP_TARGET void lay(const T* row, int64_t stride, int64_t shift, int64_t begin, int64_t end, int64_t count,
                          int64_t channels, Number* to) const {
    std::fill(to, to + begin * width_, Number(0));
    std::fill(to + end * width_, to + count * width_, Number(0));
    if (!p_.channels_last) {
      const T* const from = row + shift;
      if (stride == 1) {
        for (int64_t j = begin; j < end; ++j) to[j] = static_cast<Number>(from[j]);
      } else {
        for (int64_t j = begin; j < end; ++j) to[j] = static_cast<Number>(from[stride * j]);
      }
      return;
    }
    for (int64_t j = begin; j < end; ++j) {
      const T* const from = row + (stride * j + shift) * p_.channels;
      Number* const place = to + j * kLanes;
      if (channels == kLanes) {
        for (int64_t i = 0; i < kLanes; ++i) place[i] = static_cast<Number>(from[i]);
      } else {
        for (int64_t i = 0; i < kLanes; ++i) place[i] = i < channels ? static_cast<Number>(from[i]) : Number(0);
      }
    }
  }

  TORCHTP_TARGET void meet(int count) {
    const int blocks = (p_.x.kernel + kMostTaps - 1) / kMostTaps;
    for (int block = 0; block < blocks; ++block) {
      const int begin = p_.x.kernel * block / blocks, end = p_.x.kernel * (block + 1) / blocks;
      switch (end - begin) {
        case 1:
          taps<1>(count, begin);
          break;
        case 2:
          taps<2>(count, begin);
          break;
        case 3:
          taps<3>(count, begin);
          break;
        default:
          taps<kMostTaps>(count, begin);
      }
    }
  }

  template <int kTaps>
  TORCHTP_VECTOR void taps(int count, int begin) {
    constexpr int kRows = most_rows(kTaps);
    int row = 0;
    for (; row + kRows <= count; row += kRows) sum<kRows, kTaps>(row, begin);
    if (kRows == 3 && count - row == 2) {
      sum<2, kTaps>(row, begin);
    } else if (count - row == 1) {
      sum<1, kTaps>(row, begin);
    }
  }

  template <int kRows, int kTaps>
  TORCHTP_TARGET __attribute__((noinline)) void sum(int first, int begin) {
    const Number *in[kTaps], *grad[kRows];
    Number* places[kRows];
    for (int t = 0; t < kTaps; ++t) {
      const int64_t reached = int64_t{begin + t} * p_.x.dilation;
      in[t] = in_row_.data() + (reached % p_.x.stride * phase_ + reached / p_.x.stride) * width_;
    }
    Vector sums[kRows][kTaps];
    for (int r = 0; r < kRows; ++r) {
      const Joined& joined = joined_[first + r];
      grad[r] = gradient(joined.grad_row);
      places[r] = sums_.data() + (joined.tap * p_.x.kernel + begin) * kLanes;
      for (int t = 0; t < kTaps; ++t) sums[r][t] = load(places[r] + t * kLanes);
    }
    for (int64_t i = 0; i < vectors_ * kLanes; i += kLanes) {
      Vector own[kTaps];
      for (int t = 0; t < kTaps; ++t) own[t] = load(in[t] + i);
      for (int r = 0; r < kRows; ++r) {
        const Vector times = load(grad[r] + i);
        for (int t = 0; t < kTaps; ++t) sums[r][t] += own[t] * times;
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTaps; ++t) std::memcpy(places[r] + t * kLanes, &sums[r][t], sizeof(Vector));
    }
  }

  TORCHTP_VECTOR static Vector load(const Number* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
  }

  Number* gradient(int64_t row) { return grad_rows_.data() + row % ring_ * vectors_ * kLanes; }

  struct Joined {
    int64_t tap, grad_row;
  };

  const DepthwiseParams p_;
  const int64_t width_, vectors_, positions_, phase_, ring_, taps_;
  std::vector<Number> in_row_, grad_rows_, sums_;
  std::vector<double> totals_;  // a vector of lanes for each tap
  std::vector<Joined> joined_;
};

}  // namespace
}  // namespace torchtp::kernels
