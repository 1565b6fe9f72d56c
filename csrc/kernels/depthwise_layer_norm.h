#pragma once

#include "kernels/depthwise.h"

// Depthwise convolution of [N, C, H, W], and layer norm over the channels of its output: a block holds some positions
// with all their channels, so that the output of the convolution is not read again.
namespace torchtp::kernels {

template <typename T>
struct DepthwiseLayerNormArgs {
  const T* weight;  // [C, kernel_y, kernel_x]
  const T* bias;    // of the convolution; this and the norm's may be null
  const float* norm_weight;
  const float* norm_bias;
  float eps;
  T* out;        // own [N, C, out_height, out_width], channels first or last as the input's
  T* convolved;  // the convolution's output, which is what the backward of the norm reads; may be null
  float* mean;   // [N, out_height, out_width]
  float* rstd;
};

// Whether there is a program: stride and dilation 1, and 32 positions with all their channels in a block's shared
// memory beside the window of 32 channels.
bool depthwise_layer_norm_fits(const DepthwiseParams& params, int64_t element_bytes, size_t most_shared);

// For params that fit; the device's program.
template <typename T>
void depthwise_layer_norm_cpu(const HaloPlanes<T>& in, const DepthwiseLayerNormArgs<T>& args,
                              const DepthwiseParams& params, Part part, size_t most_shared = kMostSharedBytes);

}  // namespace torchtp::kernels
