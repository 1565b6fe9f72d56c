#pragma once

#include "kernels/layer_norm_first.h"
#include "kernels/layer_norm_last.h"
#include "kernels/split_sum.h"
#include "kernels/vectors.h"

// Which program computes a layer norm; see run_on_host.h for Run. All of it is for the device: the CPU's own loops are
// in layer_norm_cpu.cpp, with the same arithmetic.
namespace torchtp::kernels {

constexpr int64_t kMostNormChannels = 2048;  // of layouts and types alike; a thread's registers end there

inline bool layer_norm_fits(const LayerNormParams& params, bool channels_last, int64_t element_bytes,
                            size_t most_shared) {
  return params.channels <= kMostNormChannels &&
         (channels_last || layer_norm_first_fits(params, element_bytes, most_shared));
}

template <typename T, typename Run>
void run_layer_norm(const Run& run, const T* x, const float* weight, const float* bias, double eps, T* y, float* mean,
                    float* rstd, const LayerNormParams& params, bool channels_last) {
  constexpr int kWide = 16 / sizeof(T);
  const auto go = [&](auto program) {
    run.program(decltype(program)::make(x, weight, bias, eps, y, mean, rstd, params, run.most_shared));
  };
  if (params.batches * params.inner == 0) return;
  if (channels_last) {
    aligned(params.channels, kWide, {x, static_cast<const T*>(y)}) ? go(LayerNormLast<T, kWide>{})
                                                                   : go(LayerNormLast<T, 1>{});
  } else {
    aligned(params.inner, 4, {x, static_cast<const T*>(y)}) ? go(LayerNormFirst<T, 4>{}) : go(LayerNormFirst<T, 1>{});
  }
}

// Number of floats of `partials`, for the number of blocks a launch may have.
inline int64_t layer_norm_backward_scratch(const LayerNormParams& params) { return 512 * 2 * params.channels; }

// dx may be null. gradients: [2, C], of weight and bias.
template <typename T, typename Run>
void run_layer_norm_backward(const Run& run, const T* dy, const T* x, const float* weight, const float* mean,
                             const float* rstd, T* dx, float* gradients, float* partials, const LayerNormParams& params,
                             bool channels_last) {
  constexpr int kWide = 16 / sizeof(T);
  int64_t splits = 0;
  const auto go = [&](auto kind) {
    const auto program = decltype(kind)::make(dy, x, weight, mean, rstd, dx, partials, params, run.most_shared);
    run.program(program);
    splits = program.num_blocks();
  };
  const bool few = params.channels <= 2 * kNormThreads;
  if (params.batches * params.inner == 0) {
    splits = 0;
  } else if (channels_last) {
    aligned(params.channels, kWide, {dy, x, static_cast<const T*>(dx)}) ? go(LayerNormLastBackward<T, kWide>{})
                                                                        : go(LayerNormLastBackward<T, 1>{});
  } else if (aligned(params.inner, 4, {dy, x, static_cast<const T*>(dx)})) {
    few ? go(LayerNormFirstBackward<T, 4, 2>{}) : go(LayerNormFirstBackward<T, 4, 8>{});
  } else {
    few ? go(LayerNormFirstBackward<T, 1, 2>{}) : go(LayerNormFirstBackward<T, 1, 8>{});
  }
  run.program(SplitSum<float>{partials, gradients, 2 * params.channels, splits});
}

}  // namespace torchtp::kernels
