#pragma once

#include <cuda_runtime_api.h>

#include "kernels/interpolate_planes.h"

namespace torchtp::kernels {

// Resampling of the own rows and columns, one launch on `stream`; see interpolate_axis.h. T is float, c10::BFloat16 or
// c10::Half.
template <typename T>
void launch_interpolate(const T* in, T* out, const ResampleParams& params, cudaStream_t stream);
// Writes every element of `in`; no atomic additions, so the same bits on every run. G is T or float. What is written is
// aligned to 16 bytes.
template <typename T, typename G>
void launch_interpolate_adjoint(const T* out, G* in, const ResampleParams& params, cudaStream_t stream);

}  // namespace torchtp::kernels
