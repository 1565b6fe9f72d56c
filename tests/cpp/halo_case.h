#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "core/interval.h"
#include "kernels/depthwise.h"

// Whole images, and what one rank holds of them with the halos it has pulled, for tests of kernels.
namespace torchtp::test {

// [N, C, H, W] in double; the reference computes on it.
struct Image {
  int64_t batches, channels, height, width;
  std::vector<double> values;

  Image(int64_t n, int64_t c, int64_t h, int64_t w)
      : batches(n), channels(c), height(h), width(w), values(n * c * h * w) {}
  double& at(int64_t n, int64_t c, int64_t y, int64_t x) {
    return values[((n * channels + c) * height + y) * width + x];
  }
  double at(int64_t n, int64_t c, int64_t y, int64_t x) const {
    return y < 0 || y >= height || x < 0 || x >= width ? 0 : values[((n * channels + c) * height + y) * width + x];
  }
};

// Values that every one of the tested types holds exactly.
inline void fill(std::vector<double>& values, unsigned seed) {
  std::mt19937 random(seed);
  for (double& value : values) value = static_cast<int>(random() % 33) / 16.0 - 1;
}

inline Image random_image(int64_t n, int64_t c, int64_t h, int64_t w, unsigned seed) {
  Image image(n, c, h, w);
  fill(image.values, seed);
  return image;
}

template <typename T>
std::vector<T> converted(const std::vector<double>& values) {
  std::vector<T> result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = static_cast<T>(static_cast<float>(values[i]));
  return result;
}

template <typename T>
std::vector<T> cropped(const Image& image, const Interval& rows, const Interval& columns, bool channels_last) {
  std::vector<T> out;
  const auto add = [&](int64_t n, int64_t c, int64_t y, int64_t x) {
    out.push_back(static_cast<T>(static_cast<float>(image.at(n, c, y, x))));
  };
  for (int64_t n = 0; n < image.batches; ++n) {
    if (channels_last) {
      for (int64_t y = rows.begin; y < rows.end; ++y)
        for (int64_t x = columns.begin; x < columns.end; ++x)
          for (int64_t c = 0; c < image.channels; ++c) add(n, c, y, x);
    } else {
      for (int64_t c = 0; c < image.channels; ++c)
        for (int64_t y = rows.begin; y < rows.end; ++y)
          for (int64_t x = columns.begin; x < columns.end; ++x) add(n, c, y, x);
    }
  }
  return out;
}

// Rows `own_rows` and columns `own_columns`, and the halos that make them `rows` and `columns`.
template <typename T>
struct HaloCase {
  std::vector<T> own, above, below, left, right;
  kernels::HaloPlanes<T> planes;

  HaloCase(const Image& image, const Interval& own_rows, const Interval& own_columns, const Interval& rows,
           const Interval& columns, bool channels_last) {
    const Interval up{rows.begin, std::max(rows.begin, own_rows.begin)},
        down{std::min(own_rows.end, rows.end), rows.end};
    const Interval before{columns.begin, std::max(columns.begin, own_columns.begin)},
        after{std::min(own_columns.end, columns.end), columns.end};
    const Interval all_rows{own_rows.begin - up.size(), own_rows.end + down.size()};
    own = cropped<T>(image, own_rows, own_columns, channels_last);
    above = cropped<T>(image, up, own_columns, channels_last);
    below = cropped<T>(image, down, own_columns, channels_last);
    left = cropped<T>(image, all_rows, before, channels_last);
    right = cropped<T>(image, all_rows, after, channels_last);
    const auto count = [](const Interval& interval) { return static_cast<int32_t>(interval.size()); };
    planes = {{static_cast<int32_t>(image.channels), count(own_rows), count(own_columns), count(up), count(down),
               count(before), count(after)},
              own.data(),
              above.data(),
              below.data(),
              left.data(),
              right.data()};
  }
};

template <typename T>
std::vector<T> poisoned(int64_t count) {
  return std::vector<T>(count, static_cast<T>(std::numeric_limits<float>::quiet_NaN()));
}

// Bit for bit: values are small multiples of 1/256, so that sums are exact in float, whatever their order.
template <typename T>
void check_same(const std::vector<T>& found, const std::vector<T>& expected, const std::string& what) {
  CHECK_EQUAL(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const float here = found[i], there = expected[i];
    if (!(here == there)) {
      fail(__FILE__, __LINE__,
           what + ": element " + std::to_string(i) + " is " + std::to_string(here) + ", expected " +
               std::to_string(there));
    }
  }
}

// A window on images cut over ranks_y x ranks_x ranks.
struct Setting {
  Window y, x;
  int64_t batches, channels, height, width;
  int64_t ranks_y, ranks_x;
  size_t most_shared = kernels::kMostSharedBytes;  // of a block

  Setting(const Window& rows, const Window& columns, int64_t n, int64_t c, int64_t h, int64_t w, int64_t down,
          int64_t across, size_t most = kernels::kMostSharedBytes)
      : y(rows),
        x(columns),
        batches(n),
        channels(c),
        height(h),
        width(w),
        ranks_y(down),
        ranks_x(across),
        most_shared(most) {}
  // A square one.
  Setting(int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, int64_t n, int64_t c, int64_t h, int64_t w,
          int64_t down, int64_t across, size_t most = kernels::kMostSharedBytes)
      : Setting({kernel, stride, padding, dilation}, {kernel, stride, padding, dilation}, n, c, h, w, down, across,
                most) {}

  std::string name(int64_t rank_y, int64_t rank_x, bool channels_last) const {
    const auto both = [](int64_t first, int64_t second) {
      return std::to_string(first) + " x " + std::to_string(second);
    };
    return "kernel " + both(y.kernel, x.kernel) + ", stride " + both(y.stride, x.stride) + ", dilation " +
           both(y.dilation, x.dilation) + ", padding " + both(y.padding, x.padding) + ", image " + both(height, width) +
           ", rank " + both(rank_y, rank_x) + " of " + both(ranks_y, ranks_x) +
           (channels_last ? ", channels last" : ", channels first");
  }
};

// A block takes outputs that are a dilation apart; there may be fewer rows than that.
inline std::vector<Setting> dilations() {
  std::vector<Setting> all;
  for (int64_t kernel : {3, 5, 7, 9})
    for (int64_t dilation : {2, 3, 5}) {
      const int64_t padding = dilation * (kernel / 2);
      all.push_back({kernel, 1, padding, dilation, 2, 3, 19, 22, 1, 1});
      all.push_back({kernel, 1, padding, dilation, 1, 3, 26, 31, 2, 3});
      all.push_back({kernel, 1, padding - 1, dilation, 1, 2, 9, 11, 4, 2});
    }
  all.push_back({3, 1, 0, 2, 1, 34, 40, 70, 1, 1});
  all.push_back({7, 1, 9, 3, 3, 2, 50, 250, 1, 1});
  all.push_back({3, 1, 30, 30, 1, 2, 24, 26, 2, 1});
  all.push_back({13, 1, 12, 2, 1, 9, 30, 70, 2, 1});
  all.push_back({4, 1, 3, 2, 1, 2, 12, 13, 2, 1});
  return all;
}

// Gradients at a stride of 2 have other taps on even than on odd rows, and which these are depends on the padding and
// on the rank.
inline std::vector<Setting> strides_of_two() {
  std::vector<Setting> all;
  for (int64_t kernel : {3, 5, 7})
    for (int64_t padding = 0; padding <= kernel / 2 + 1; ++padding) {
      all.push_back({kernel, 2, padding, 1, 2, 3, 12 + padding, 15, 1, 1});
      all.push_back({kernel, 2, padding, 1, 1, 3, 19, 26 + padding, 2, 3});
      all.push_back({kernel, 2, padding, 1, 1, 2, 9, 11, 4, 4});
    }
  all.push_back({3, 2, 1, 1, 1, 34, 40, 70, 1, 1});
  all.push_back({5, 2, 2, 1, 3, 2, 41, 150, 1, 1});
  return all;
}

// Unit steps, for the products of matrices that 16-bit numbers take: images and shards of every alignment.
inline std::vector<Setting> bands() {
  return {
      {7, 1, 3, 1, 2, 19, 37, 75, 1, 1},
      {7, 1, 3, 1, 1, 3, 70, 140, 2, 2},
      {5, 1, 2, 1, 1, 17, 20, 9, 2, 3},
      {3, 1, 1, 1, 2, 33, 9, 70, 3, 1},
      {7, 1, 3, 1, 1, 8, 5, 9, 4, 4},
      {7, 1, 0, 1, 1, 2, 19, 9, 1, 1},
      {7, 1, 6, 1, 2, 5, 17, 32, 1, 1},
      {5, 1, 4, 1, 1, 16, 16, 64, 1, 2},
      {7, 1, 3, 1, 1, 16, 64, 96, 1, 3},
      {3, 1, 1, 1, 3, 4, 1, 131, 1, 2},
      {7, 1, 3, 1, 1, 40, 33, 3, 2, 1},
      {3, 1, 0, 1, 1, 24, 40, 40, 2, 2},
      {7, 1, 3, 1, 1, 150, 3, 4, 1, 1, kernels::kLeastSharedBytes},
      {7, 1, 3, 1, 1, 33, 70, 40, 1, 1, kernels::kLeastSharedBytes},
  };
}

// Any kernel, stride, dilation and padding in either dim, on few or no rows and columns a rank.
inline std::vector<Setting> random_settings(int count, unsigned seed) {
  std::mt19937 random(seed);
  const auto draw = [&](std::initializer_list<int64_t> from) { return from.begin()[random() % from.size()]; };
  std::vector<Setting> all;
  for (int i = 0; i < count; ++i) {
    Window windows[2];
    int64_t extents[2];
    for (int dim : {0, 1}) {
      const int64_t kernel = draw({1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 13, 16, 31});
      const int64_t dilation = kernel < 9 ? draw({1, 1, 2, 3, 4}) : draw({1, 2});
      Window& window = windows[dim] = {kernel, draw({1, 2, 2, 2, 3, 4}), 0, dilation};
      window.padding = random() % (window.reach() / 2 + 2);
      const int64_t least = std::max<int64_t>(1, window.reach() + 1 - 2 * window.padding);
      extents[dim] = least + static_cast<int64_t>(random() % 16);
    }
    all.push_back({windows[0], windows[1], draw({1, 2}), draw({1, 3, 9}), extents[0], extents[1], draw({1, 2, 3, 4}),
                   draw({1, 2, 3}), static_cast<size_t>(draw({82, 147, 200})) * 1024});
  }
  return all;
}

// Rows that the windows of `outputs` read; outputs that read any of `inputs`.
inline Interval needs(const Interval& outputs, const Window& window, int64_t extent) {
  return intersect(read_by(outputs, window), {0, extent});
}
inline Interval readers(const Interval& inputs, const Window& window, int64_t extent) {
  return intersect(readers_of(inputs, window), {0, extent});
}

// A depthwise convolution of the whole image, and its gradients.
struct DepthwiseCase {
  Window y, x;

  Image forward(const Image& in, const std::vector<double>& weight, const std::vector<double>& bias) const {
    Image out(in.batches, in.channels, output_extent(y, in.height), output_extent(x, in.width));
    for_each(out, [&](int64_t n, int64_t c, int64_t oy, int64_t ox) {
      double sum = bias.empty() ? 0 : bias[c];
      taps(oy, ox, [&](int64_t tap, int64_t iy, int64_t ix) {
        sum += in.at(n, c, iy, ix) * weight[c * y.kernel * x.kernel + tap];
      });
      out.at(n, c, oy, ox) = sum;
    });
    return out;
  }
  Image input_grad(const Image& in, const Image& grad_out, const std::vector<double>& weight) const {
    Image grad(in.batches, in.channels, in.height, in.width);
    for_each(grad_out, [&](int64_t n, int64_t c, int64_t oy, int64_t ox) {
      taps(oy, ox, [&](int64_t tap, int64_t iy, int64_t ix) {
        if (iy < 0 || iy >= in.height || ix < 0 || ix >= in.width) return;
        grad.at(n, c, iy, ix) += grad_out.at(n, c, oy, ox) * weight[c * y.kernel * x.kernel + tap];
      });
    });
    return grad;
  }
  // The products whose input lies in the rows and columns given.
  std::vector<double> weight_grad(const Image& in, const Image& grad_out, const Interval& rows,
                                  const Interval& columns) const {
    std::vector<double> grad(in.channels * y.kernel * x.kernel);
    for_each(grad_out, [&](int64_t n, int64_t c, int64_t oy, int64_t ox) {
      taps(oy, ox, [&](int64_t tap, int64_t iy, int64_t ix) {
        if (iy < rows.begin || iy >= rows.end || ix < columns.begin || ix >= columns.end) return;
        grad[c * y.kernel * x.kernel + tap] += grad_out.at(n, c, oy, ox) * in.at(n, c, iy, ix);
      });
    });
    return grad;
  }

  // The numbers of a rank that owns these inputs and outputs.
  kernels::DepthwiseParams params(const Image& in, const Interval& in_rows, const Interval& in_columns,
                                  const Interval& out_rows, const Interval& out_columns, bool channels_last) const {
    const auto axis = [](const Window& window, const Interval& inputs, const Interval& outputs) {
      return kernels::DepthwiseAxis{
          static_cast<int32_t>(window.kernel), static_cast<int32_t>(window.stride),
          static_cast<int32_t>(window.dilation),
          static_cast<int32_t>(window.padding + inputs.begin - window.stride * outputs.begin)};
    };
    const auto count = [](const Interval& interval) { return static_cast<int32_t>(interval.size()); };
    return {in.batches,
            static_cast<int32_t>(in.channels),
            count(in_rows),
            count(in_columns),
            count(out_rows),
            count(out_columns),
            axis(y, in_rows, out_rows),
            axis(x, in_columns, out_columns),
            channels_last};
  }

 private:
  template <typename F>
  static void for_each(const Image& image, const F& f) {
    for (int64_t n = 0; n < image.batches; ++n)
      for (int64_t c = 0; c < image.channels; ++c)
        for (int64_t iy = 0; iy < image.height; ++iy)
          for (int64_t ix = 0; ix < image.width; ++ix) f(n, c, iy, ix);
  }
  template <typename F>
  void taps(int64_t oy, int64_t ox, const F& f) const {
    for (int64_t ky = 0; ky < y.kernel; ++ky)
      for (int64_t kx = 0; kx < x.kernel; ++kx)
        f(ky * x.kernel + kx, oy * y.stride - y.padding + ky * y.dilation, ox * x.stride - x.padding + kx * x.dilation);
  }
};

// check(T{}, setting) for all settings, with the kernels' types in turn.
template <typename Check>
void in_each_type(const std::vector<Setting>& settings, const Check& check) {
  for (size_t i = 0; i < settings.size(); ++i) {
    if (i % 3 == 0) check(float{}, settings[i]);
    if (i % 3 == 1) check(c10::BFloat16{}, settings[i]);
    if (i % 3 == 2) check(c10::Half{}, settings[i]);
  }
}

}  // namespace torchtp::test
