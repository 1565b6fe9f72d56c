#include "kernels/depthwise_weight_rows.h"

#define TORCHTP_TARGET
#define TORCHTP_VECTOR __attribute__((always_inline)) inline
#include "kernels/depthwise_weight_rows_loops.h"

namespace torchtp::kernels {
namespace {

// What every processor that there is a build for has.
struct Narrow {
  using Floats = float __attribute__((vector_size(16)));
  using Doubles = double __attribute__((vector_size(16)));
};

template <typename T>
void narrow_rows(const T* in, const T* grad_out, T* grad_weight, const DepthwiseParams& params, int64_t first,
                 int64_t last) {
  DepthwiseWeightRows<Narrow, T>(params).run(in, grad_out, grad_weight, first, last);
}

}  // namespace

template <typename T>
std::vector<DepthwiseWeightGrad<T>*> depthwise_weight_rows_of_each_width() {
  std::vector<DepthwiseWeightGrad<T>*> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(avx2::depthwise_weight_rows<T>);
#endif
  found.push_back(narrow_rows<T>);
  return found;
}

template <typename T>
void depthwise_weight_rows(const T* in, const T* grad_out, T* grad_weight, const DepthwiseParams& params, int64_t first,
                           int64_t last) {
  static DepthwiseWeightGrad<T>* const widest = depthwise_weight_rows_of_each_width<T>()[0];
  widest(in, grad_out, grad_weight, params, first, last);
}

#define TORCHTP_DEPTHWISE(T)                                                           \
  template std::vector<DepthwiseWeightGrad<T>*> depthwise_weight_rows_of_each_width(); \
  template void depthwise_weight_rows(const T*, const T*, T*, const DepthwiseParams&, int64_t, int64_t);
TORCHTP_FOR_EACH_NUMBER(TORCHTP_DEPTHWISE)
#undef TORCHTP_DEPTHWISE

}  // namespace torchtp::kernels
