// Max pooling over a rank's rows of a cut plane: the kernels of the CPU and, element by element, those of a device.
#include "kernels/max_pool.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <limits>

#include "check.h"
#include "close.h"
#include "core/interval.h"
#include "kernels/max_pool_each.h"
#include "kernels/run_on_host.h"

using namespace torchtp;
using kernels::MaxPoolParams;

namespace {

struct Dim {
  int64_t extent = 1;
  Window window;
  bool ceil_mode = false, cut = true;
};

struct Case {
  MaxPoolParams params{};
  std::vector<int64_t> indices;  // global, of every output element
  std::vector<int64_t> local;    // the same in the frame
  std::vector<int64_t> outputs;  // where each output element lies, and its maximum in the frame
  std::vector<int64_t> maxima;
};

// Rank `rank` of `ranks`; every window's maximum is at a tap drawn by lot.
Case draw(const Dim (&dims)[3], int64_t ranks, int64_t rank, int64_t channels, bool channels_last, unsigned seed) {
  Case drawn;
  MaxPoolParams& p = drawn.params;
  p = {2, channels, 1, 1, channels_last, {}, {}};
  Interval own[3];
  for (int i = 0; i < 3; ++i) {
    const Dim& dim = dims[i];
    const int64_t all = output_extent(dim.window, dim.extent, dim.ceil_mode);
    own[i] = dim.cut ? owned(all, ranks, rank) : Interval{0, all};
    const Interval frame = dim.cut ? read_by(own[i], dim.window) : Interval{0, dim.extent};
    p.index.frame[i] = frame.size();
    p.index.global[i] = dim.extent;
    p.index.begin[i] = frame.begin;
    p.index.dilation[i] = dim.window.dilation;
    p.windows.outputs[i] = own[i].size();
    p.windows.kernel[i] = dim.window.kernel;
    p.windows.stride[i] = dim.window.stride;
    p.windows.padding[i] = dim.cut ? 0 : dim.window.padding;
    p.outputs *= own[i].size();
    p.inputs *= frame.size();
  }
  std::mt19937 random(seed);
  for (int64_t n = 0; n < p.batches; ++n)
    for (int64_t c = 0; c < p.channels; ++c)
      for (int64_t o = 0; o < p.outputs; ++o) {
        int64_t global = 0, local = 0, rest = o, at[3];
        for (int i = 2; i >= 0; --i) {
          at[i] = own[i].begin + rest % own[i].size();
          rest /= own[i].size();
        }
        for (int i = 0; i < 3; ++i) {
          std::vector<int64_t> taps;
          for (int64_t k = 0; k < dims[i].window.kernel; ++k) {
            const int64_t x = at[i] * dims[i].window.stride - dims[i].window.padding + k * dims[i].window.dilation;
            if (x >= 0 && x < dims[i].extent) taps.push_back(x);
          }
          const int64_t x = taps[random() % taps.size()];
          global = global * dims[i].extent + x;
          local = local * p.index.frame[i] + x - p.index.begin[i];
        }
        drawn.indices.push_back(global);
        drawn.local.push_back(local);
        drawn.outputs.push_back(channels_last ? (n * p.outputs + o) * p.channels + c
                                              : (n * p.channels + c) * p.outputs + o);
        drawn.maxima.push_back(channels_last ? (n * p.inputs + local) * p.channels + c
                                             : (n * p.channels + c) * p.inputs + local);
      }
  return drawn;
}

template <typename T>
std::vector<T> in_order(const std::vector<T>& values, const std::vector<int64_t>& places) {
  std::vector<T> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[places[i]] = values[i];
  return out;
}

template <typename T>
void check(const Case& drawn, const std::string& name) {
  const MaxPoolParams& p = drawn.params;
  const int64_t planes = p.batches * p.channels;
  const auto indices = in_order(drawn.indices, drawn.outputs);

  auto dy = test::noise(planes * p.outputs, 1), frame = test::noise(planes * p.inputs, 2);
  const auto t_dy = test::rounded<T>(dy), t_frame = test::rounded<T>(frame);
  std::vector<double> gradient(frame.size()), gathered(dy.size());
  for (size_t i = 0; i < drawn.outputs.size(); ++i) {
    gradient[drawn.maxima[i]] += dy[drawn.outputs[i]];
    gathered[drawn.outputs[i]] = frame[drawn.maxima[i]];
  }
  const kernels::RunOnHost host;
  std::vector<float> scattered(frame.size()), by_each(frame.size(), std::numeric_limits<float>::quiet_NaN());
  CHECK(kernels::max_pool_scatter_cpu(t_dy.data(), indices.data(), scattered.data(), p, 0, planes) == -1);
  kernels::run_max_pool_backward(host, t_dy.data(), indices.data(), by_each.data(), p);
  std::vector<float> of_many(frame.size());  // as where elements are too many for Divider
  host.each(
      kernels::MaxPoolBackward<T, float, 1, kernels::LongDivider>(t_dy.data(), indices.data(), of_many.data(), p));
  CHECK(of_many == by_each);
  std::vector<T> narrow(frame.size(), static_cast<T>(std::numeric_limits<float>::quiet_NaN()));
  kernels::run_max_pool_backward(host, t_dy.data(), indices.data(), narrow.data(), p);
  for (size_t i = 0; i < narrow.size(); ++i) CHECK(narrow[i] == static_cast<T>(by_each[i]));
  test::check_close(scattered, gradient, 1e-5, name + ", gradient");
  test::check_close(by_each, gradient, 1e-5, name + ", gradient of each");

  std::vector<T> out(dy.size()), of_each(dy.size());
  CHECK(kernels::max_pool_gather_cpu(t_frame.data(), indices.data(), out.data(), p, 0, planes) == -1);
  kernels::run_max_pool_gather(host, t_frame.data(), indices.data(), of_each.data(), p);
  test::check_close(out, gathered, 0, name + ", gathered");
  test::check_close(of_each, gathered, 0, name + ", gathered by each");

  // An index that leads out of the frame's memory is found, and nothing is read or written there.
  for (const int64_t index : {int64_t{-1}, int64_t{1} << 31, int64_t{1} << 32, std::numeric_limits<int64_t>::min()}) {
    if (indices.empty()) break;
    auto wrong = indices;
    const auto place = static_cast<int64_t>(wrong.size() / 2);
    wrong[place] = index;
    CHECK(kernels::max_pool_scatter_cpu(t_dy.data(), wrong.data(), scattered.data(), p, 0, planes) == place);
    CHECK(kernels::max_pool_gather_cpu(t_frame.data(), wrong.data(), out.data(), p, 0, planes) == place);
  }

  auto local = drawn.local;
  kernels::run_max_pool_to_global(host, local.data(), p.index, static_cast<int64_t>(local.size()));
  CHECK(local == drawn.indices);
}

void any_window_on_any_rank() {
  std::mt19937 random(7);
  const auto one_of = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % (high - low + 1));
  };
  for (unsigned turn = 0; turn < 150; ++turn) {
    Dim dims[3];
    const int count = turn % 3 == 0 ? 3 : 2;
    for (int i = 3 - count; i < 3; ++i) {
      Dim& dim = dims[i];
      dim.window.kernel = one_of(1, 4);
      dim.window.stride = one_of(1, 4);
      dim.window.dilation = one_of(1, 2);
      dim.window.padding = one_of(0, dim.window.kernel / 2);
      // Down to planes that one window covers, padding on both sides; a dilated one has a tap in them.
      dim.extent = std::max(dim.window.dilation, dim.window.reach() + 1 - 2 * dim.window.padding) + one_of(0, 8);
      dim.ceil_mode = one_of(0, 1);
      dim.cut = one_of(0, 2) > 0;
    }
    for (int64_t rank = 0; rank < 3; ++rank) {
      const Case drawn = draw(dims, 3, rank, turn % 4 == 1 ? 8 : 3, turn % 2, turn);
      const std::string name = "turn " + std::to_string(turn) + ", rank " + std::to_string(rank);
      check<float>(drawn, name);
      check<c10::BFloat16>(drawn, name + ", bf16");
      check<c10::Half>(drawn, name + ", fp16");
    }
  }
}

// A window of nothing but -inf: its first tap that is no padding, as PyTorch says.
void a_window_without_a_maximum() {
  const kernels::PoolIndex index{{1, 4, 5}, {1, 8, 8}, {0, -1, -2}, {1, 1, 2}};
  int64_t first = 0;
  kernels::run_max_pool_to_global(kernels::RunOnHost(), &first, index, 1);
  CHECK_EQUAL(first, 0);
  const kernels::PoolIndex odd{{1, 4, 5}, {1, 8, 8}, {0, 2, -1}, {1, 1, 2}};
  first = 0;
  kernels::run_max_pool_to_global(kernels::RunOnHost(), &first, odd, 1);
  CHECK_EQUAL(first, 2 * 8 + 1);
}

}  // namespace

int main() {
  return test::run(
      {{"any window on any rank", any_window_on_any_rank}, {"a window without a maximum", a_window_without_a_maximum}});
}
