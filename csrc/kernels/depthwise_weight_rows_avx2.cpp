#if defined(__x86_64__)

#define TORCHTP_TARGET __attribute__((target("avx2,fma")))
#define TORCHTP_VECTOR __attribute__((target("avx2,fma"), always_inline)) inline
#include "kernels/depthwise_weight_rows_loops.h"

namespace torchtp::kernels {
namespace {

struct Avx2 {
  using Floats = float __attribute__((vector_size(32)));
  using Doubles = double __attribute__((vector_size(32)));
};

}  // namespace

template <typename T>
void avx2::depthwise_weight_rows(const T* in, const T* grad_out, T* grad_weight, const DepthwiseParams& params,
                                 int64_t first, int64_t last) {
  DepthwiseWeightRows<Avx2, T>(params).run(in, grad_out, grad_weight, first, last);
}

#define TORCHTP_DEPTHWISE(T) \
  template void avx2::depthwise_weight_rows(const T*, const T*, T*, const DepthwiseParams&, int64_t, int64_t);
TORCHTP_FOR_EACH_NUMBER(TORCHTP_DEPTHWISE)
#undef TORCHTP_DEPTHWISE

}  // namespace torchtp::kernels

#endif
