#pragma once

#include <string>
#include <vector>

#include "core/interval.h"
#include "spatial/device.h"

#ifdef TORCHTP_CUDA
namespace torchtp::spatial {

// One spatial dim of a resampling: global extents, and the rows that are here.
struct ResampledDim {
  int64_t in_extent, out_extent;
  Interval inputs, outputs;
  double scale;  // 0: from the extents
};

// From input rows to output rows by the kernels of kernels/interpolate_cuda.h. x: [N, C, the dims...], dense, of a type
// that has_cuda_kernels.
at::Tensor interpolate_cuda(const at::Tensor& x, const std::vector<ResampledDim>& dims, const std::string& mode,
                            bool align_corners);
// The adjoint. It adds in float, and gives the type of dy, or float if `wide`: for what is added to.
at::Tensor interpolate_adjoint_cuda(const at::Tensor& dy, const std::vector<ResampledDim>& dims,
                                    const std::string& mode, bool align_corners, bool wide);

}  // namespace torchtp::spatial
#endif
