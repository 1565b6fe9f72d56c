#pragma once

#include <cuda_runtime_api.h>

#include "kernels/norm.h"
#include "kernels/norm_finish.h"

// The passes of norm.h over a whole tensor, enqueued on `stream`; one launch each. T is float, c10::BFloat16 or
// c10::Half.
namespace torchtp::kernels {

// The passes that reduce do so in this many pieces, which the caller merges. dy: null for moments.
template <typename T>
int64_t norm_pieces_cuda(const T* x, const T* dy, const NormShape& shape, bool channels_last);
// mean, m2: [pieces, N, C]; counts: [pieces], elements of each plane in a piece.
template <typename T>
void launch_norm_moments(const T* x, double* mean, double* m2, double* counts, int64_t batches, const NormShape& shape,
                         bool channels_last, int64_t pieces, cudaStream_t stream);
// sum, dot: [pieces, N, C]; center: one for each of num_centers groups of channels, of each batch, or null for 0;
// scaled: dy * scale in the same pass, where it is not null, of memory aligned to 16 bytes.
template <typename T>
void launch_norm_dots(const T* dy, const T* x, const float* center, double* sum, double* dot, T* scaled,
                      const float* scale, int64_t batches, const NormShape& shape, bool channels_last, int64_t pieces,
                      int64_t num_centers, cudaStream_t stream);
// Between the passes; see norm_finish.h.
void launch_norm_finish(const NormFinish& finish, cudaStream_t stream);
void launch_norm_finish(const NormGradFinish& finish, cudaStream_t stream);

template <typename T>
void launch_norm_affine(const T* x, T* y, const float* center, const float* scale, const float* shift, int64_t batches,
                        const NormShape& shape, bool channels_last, cudaStream_t stream);
template <typename T>
void launch_norm_combine(const T* dy, const T* x, T* dx, const float* center, const float* on_dy, const float* on_x,
                         const float* shift, int64_t batches, const NormShape& shape, bool channels_last,
                         cudaStream_t stream);

}  // namespace torchtp::kernels
