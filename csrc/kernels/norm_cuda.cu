#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/block_program_cuda.h"
#include "kernels/norm_cuda.h"
#include "kernels/norm_plan.h"

namespace torchtp::kernels {

template <typename T>
int64_t norm_pieces_cuda(const T* x, const T* dy, const NormShape& shape, bool channels_last) {
  return norm_reduce_pieces(x, dy, shape, channels_last);
}

template <typename T>
void launch_norm_moments(const T* x, double* mean, double* m2, double* counts, int64_t batches, const NormShape& shape,
                         bool channels_last, int64_t pieces, cudaStream_t stream) {
  const T* const no_dy = nullptr;
  run_norm_reduce<T, false>(RunOnDevice{"norm_moments", stream}, x, no_dy, nullptr, mean, m2, counts, nullptr, nullptr,
                            batches, shape, channels_last, pieces, shape.channels);
}

template <typename T>
void launch_norm_dots(const T* dy, const T* x, const float* center, double* sum, double* dot, T* scaled,
                      const float* scale, int64_t batches, const NormShape& shape, bool channels_last, int64_t pieces,
                      int64_t num_centers, cudaStream_t stream) {
  run_norm_reduce<T, true>(RunOnDevice{"norm_dots", stream}, x, dy, center, sum, dot, nullptr, scaled, scale, batches,
                           shape, channels_last, pieces, num_centers);
}

void launch_norm_finish(const NormFinish& finish, cudaStream_t stream) {
  run_norm_finish(RunOnDevice{"norm_finish", stream}, finish);
}
void launch_norm_finish(const NormGradFinish& finish, cudaStream_t stream) {
  run_norm_finish(RunOnDevice{"norm_grad_finish", stream}, finish);
}

template <typename T>
void launch_norm_affine(const T* x, T* y, const float* center, const float* scale, const float* shift, int64_t batches,
                        const NormShape& shape, bool channels_last, cudaStream_t stream) {
  const T* const no_dy = nullptr;
  run_norm_apply<T, false>(RunOnDevice{"norm_affine", stream}, no_dy, x, y, center, nullptr, scale, shift, batches,
                           shape, channels_last);
}

template <typename T>
void launch_norm_combine(const T* dy, const T* x, T* dx, const float* center, const float* on_dy, const float* on_x,
                         const float* shift, int64_t batches, const NormShape& shape, bool channels_last,
                         cudaStream_t stream) {
  run_norm_apply<T, true>(RunOnDevice{"norm_combine", stream}, dy, x, dx, center, on_dy, on_x, shift, batches, shape,
                          channels_last);
}

#define TORCHTP_NORM(T)                                                                                               \
  template int64_t norm_pieces_cuda(const T*, const T*, const NormShape&, bool);                                      \
  template void launch_norm_moments(const T*, double*, double*, double*, int64_t, const NormShape&, bool, int64_t,    \
                                    cudaStream_t);                                                                    \
  template void launch_norm_dots(const T*, const T*, const float*, double*, double*, T*, const float*, int64_t,       \
                                 const NormShape&, bool, int64_t, int64_t, cudaStream_t);                             \
  template void launch_norm_affine(const T*, T*, const float*, const float*, const float*, int64_t, const NormShape&, \
                                   bool, cudaStream_t);                                                               \
  template void launch_norm_combine(const T*, const T*, T*, const float*, const float*, const float*, const float*,   \
                                    int64_t, const NormShape&, bool, cudaStream_t);
TORCHTP_NORM(float)
TORCHTP_NORM(c10::BFloat16)
TORCHTP_NORM(c10::Half)
#undef TORCHTP_NORM

}  // namespace torchtp::kernels
