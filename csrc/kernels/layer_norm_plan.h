#pragma once

#include "kernels/factors.h"
#include "kernels/layer_norm_first.h"
#include "kernels/layer_norm_first_backward.h"
#include "kernels/layer_norm_last.h"
#include "kernels/split_sum.h"
#include "kernels/vectors.h"

// Which program computes a layer norm; see run_on_host.h for Run. All of it is for the device: the CPU's own loops are
// in layer_norm_cpu.cpp, with the same arithmetic.
namespace torchtp::kernels {

constexpr int64_t kMostNormChannels = 2048;  // of layouts and types alike; a thread's registers end there
constexpr int64_t kMostNormBlocks = 512;     // that leave a part of the gradients of weight and bias each

inline bool layer_norm_fits(const LayerNormParams& params, bool channels_last, size_t most_shared) {
  return params.channels <= kMostNormChannels && (channels_last || layer_norm_first_fits(params, most_shared));
}

// Calls go(std::integral_constant<int, elements>) for the most that one load may take: 16 bytes, or 8, or one element.
template <typename T, typename Go>
void with_widest_load(int64_t innermost, std::initializer_list<const T*> pointers, const Go& go) {
  constexpr int kWide = 16 / sizeof(T);
  if (aligned(innermost, kWide, pointers)) return go(std::integral_constant<int, kWide>());
  if (kWide > 4 && aligned(innermost, 4, pointers)) return go(std::integral_constant<int, 4>());
  go(std::integral_constant<int, 1>());
}

template <typename T, typename Run>
void run_layer_norm(const Run& run, const T* x, const Factors<T>& weight, const Factors<T>& bias, double eps, T* y,
                    float* mean, float* rstd, const LayerNormParams& params, bool channels_last) {
  if (params.batches * params.inner == 0) return;
  if (!channels_last) {
    return with_widest_load<T>(params.inner, {x, y}, [&](auto vector) {
      run.program(LayerNormFirst<T, vector()>::make(x, weight, bias, eps, y, mean, rstd, params, run.most_shared,
                                                    run.multiprocessors));
    });
  }
  constexpr int kWide = 16 / sizeof(T);
  const auto go = [&](auto program) {
    run.program(decltype(program)::make(x, weight, bias, eps, y, mean, rstd, params));
  };
  const auto by_channels = [&](auto vector) {
    constexpr int kVector = vector();
    if (params.channels <= 32 * 16) return go(LayerNormLast<T, kVector, 16>{});
    if (params.channels <= 32 * 32) return go(LayerNormLast<T, kVector, 32>{});
    go(LayerNormLast<T, kVector, 64>{});
  };
  const bool wide = aligned<T>(params.channels, kWide, {x, y}) && weight.aligned() && bias.aligned();
  wide ? by_channels(std::integral_constant<int, kWide>()) : by_channels(std::integral_constant<int, 1>());
}

// Number of floats of `partials`, for the number of blocks a launch may have.
inline int64_t layer_norm_backward_scratch(const LayerNormParams& params) {
  return kMostNormBlocks * 2 * params.channels;
}

// dx may be null. gradients: [2, C], of weight and bias.
template <typename T, typename G, typename Run>
void run_layer_norm_backward(const Run& run, const T* dy, const T* x, const Factors<T>& weight, const float* mean,
                             const float* rstd, T* dx, G* gradients, float* partials, const LayerNormParams& params,
                             bool channels_last) {
  int64_t splits = 0;
  const auto go = [&](const auto& program) {
    run.program(program);
    splits = program.num_blocks();
  };
  constexpr int kWide = 16 / sizeof(T);
  const auto last = [&](auto kind) {
    using Program = decltype(kind);
    const int64_t blocks = std::min<int64_t>(kMostNormBlocks, Program::kBlocksPerSm * run.multiprocessors);
    go(Program::make(dy, x, weight, mean, rstd, dx, partials, params, blocks));
  };
  const auto first = [&](auto kind) {
    go(decltype(kind)::make(dy, x, weight, mean, rstd, dx, partials, params, run.most_shared, run.multiprocessors,
                            kMostNormBlocks));
  };
  const std::initializer_list<const T*> images{dy, x, dx};
  if (params.batches * params.inner > 0 && channels_last) {
    aligned(params.channels, kWide, images) && weight.aligned() ? last(LayerNormLastBackward<T, kWide>{})
                                                                : last(LayerNormLastBackward<T, 1>{});
  } else if (params.batches * params.inner > 0) {
    with_widest_load<T>(params.inner, images, [&](auto vector) {
      constexpr int kVector = vector();
      params.channels <= 2 * kTileThreads ? first(LayerNormFirstBackward<T, kVector, 2>{})
                                          : first(LayerNormFirstBackward<T, kVector, 8>{});
    });
  }
  run.program(SplitSum<G>{partials, gradients, 2 * params.channels, splits});
}

}  // namespace torchtp::kernels
