#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "kernels/block_program.h"
#include "kernels/halo_planes.h"

// Depthwise convolution of [N, C, H, W], one kernel_y x kernel_x filter for each channel, on the rows and columns of
// this rank: halos are read where they lie. Sums are taken in float.
namespace torchtp::kernels {

// Of each dim: what a block has room for on any device, and what 32 bits count.
constexpr int32_t kMostDepthwiseKernel = 31, kMostDepthwiseStride = 4, kMostDepthwiseDilation = 1 << 24;

// Output row o reads the input rows stride * o + dilation * k - offset for tap k; both count from this rank's first
// row. On one rank `offset` is the padding.
struct DepthwiseAxis {
  int32_t kernel = 1, stride = 1, dilation = 1, offset = 0;

  TORCHTP_HOST_DEVICE int32_t reach() const { return dilation * (kernel - 1); }
};

struct DepthwiseParams {
  int64_t batches;
  int32_t channels;
  int32_t in_height, in_width, out_height, out_width;  // of this rank
  DepthwiseAxis y, x;
  bool channels_last;
};

// Interior: what can be computed before any halo is there. Border: the rest.
enum class Part { kAll, kInterior, kBorder };

// Input and output in each other's place.
inline DepthwiseParams with_extents_swapped(DepthwiseParams params) {
  std::swap(params.in_height, params.out_height);
  std::swap(params.in_width, params.out_width);
  return params;
}

// The convolution whose output is the gradient of the input, for a stride of 1: the taps are mirrored.
inline DepthwiseParams input_grad_as_forward(DepthwiseParams params) {
  params.y.offset = params.y.reach() - params.y.offset;
  params.x.offset = params.x.reach() - params.x.offset;
  return with_extents_swapped(params);
}

inline bool unit_steps(const DepthwiseParams& params) {
  return params.y.stride == 1 && params.x.stride == 1 && params.y.dilation == 1 && params.x.dilation == 1;
}

// What each launch computes: rows first, then the columns beside them; all of one part.
std::array<Regions, 2> depthwise_regions(const DepthwiseParams& params, const HaloExtents& in, Part part,
                                         bool input_grad);

// weight: [C, kernel_y, kernel_x]; bias may be null; out: own [N, C, out_height, out_width]. The device's programs, in
// blocks that have `most_shared` bytes of shared memory.
template <typename T>
void depthwise_cpu(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out, const DepthwiseParams& params,
                   Part part, size_t most_shared = kMostSharedBytes);

// grad_in: own [N, C, in_height, in_width], from the gradient of the output with its halo.
template <typename T>
void depthwise_input_grad_cpu(const HaloPlanes<T>& grad_out, const T* weight, T* grad_in, const DepthwiseParams& params,
                              Part part, size_t most_shared = kMostSharedBytes);

}  // namespace torchtp::kernels
