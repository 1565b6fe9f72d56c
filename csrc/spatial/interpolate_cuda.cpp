#include "spatial/interpolate_cuda.h"

#ifdef TORCHTP_CUDA
#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>

#include "kernels/interpolate_cuda.h"
#include "kernels/narrow.h"

namespace torchtp::spatial {
namespace {

using kernels::narrow;

kernels::ResampleAxis axis_of(const ResampledDim& dim, const std::string& mode, bool align_corners) {
  kernels::ResampleAxis axis = kernels::resample_axis(mode, dim.in_extent, dim.out_extent, dim.scale, align_corners);
  axis.in_begin = narrow(dim.inputs.begin);
  axis.in_size = narrow(dim.inputs.size());
  axis.out_begin = narrow(dim.outputs.begin);
  axis.out_size = narrow(dim.outputs.size());
  return axis;
}

// A dim that stays as it is.
kernels::ResampleAxis same(int64_t extent) {
  kernels::ResampleAxis axis;
  axis.in_extent = axis.in_size = axis.out_extent = axis.out_size = narrow(extent);
  return axis;
}

}  // namespace

namespace {

// `wide`: the adjoint's result in float.
at::Tensor resample_on_device(const at::Tensor& x, const std::vector<ResampledDim>& dims, const std::string& mode,
                              bool align_corners, bool adjoint, bool wide) {
  const OnDevice device(x);
  const auto format = x.suggest_memory_format();
  const bool channels_last = format != at::MemoryFormat::Contiguous;
  at::Tensor from = x;
  // Two dims at once, the last ones first; a third by itself, with those behind it as the inner one.
  const auto count = static_cast<int64_t>(dims.size());
  for (int64_t end = count; end > 0; end -= 2) {
    const int64_t begin = std::max<int64_t>(0, end - 2);
    std::vector<int64_t> sizes = from.sizes().vec();
    kernels::ResampleParams params;
    params.outer = channels_last ? sizes[0] : sizes[0] * sizes[1];
    params.inner = channels_last ? sizes[1] : 1;
    for (int64_t dim = 0; dim < begin; ++dim) params.outer *= sizes[dim + 2];
    for (int64_t dim = end; dim < count; ++dim) params.inner *= sizes[dim + 2];
    params.y = end - begin == 2 ? axis_of(dims[begin], mode, align_corners) : same(1);
    params.x = axis_of(dims[end - 1], mode, align_corners);
    for (int64_t dim = begin; dim < end; ++dim) {
      sizes[dim + 2] = adjoint ? dims[dim].inputs.size() : dims[dim].outputs.size();
    }
    // What is added to again is not rounded before.
    const bool in_float = adjoint && (wide || begin > 0);
    const at::Tensor to = at::empty(sizes, in_float ? from.options().dtype(at::kFloat) : from.options(), format);
    AT_DISPATCH_V2(from.scalar_type(), "interpolate", AT_WRAP([&] {
                     const scalar_t* const source = from.const_data_ptr<scalar_t>();
                     if (!adjoint) {
                       kernels::launch_interpolate(source, to.mutable_data_ptr<scalar_t>(), params, device.stream());
                       return;
                     }
                     const auto launch = [&](auto* target) {
                       kernels::launch_interpolate_adjoint(source, target, params, device.stream());
                     };
                     in_float ? launch(to.mutable_data_ptr<float>()) : launch(to.mutable_data_ptr<scalar_t>());
                   }),
                   TORCHTP_CUDA_TYPES);
    from = to;
  }
  return from;
}

}  // namespace

at::Tensor interpolate_cuda(const at::Tensor& x, const std::vector<ResampledDim>& dims, const std::string& mode,
                            bool align_corners) {
  return resample_on_device(x, dims, mode, align_corners, false, false);
}

at::Tensor interpolate_adjoint_cuda(const at::Tensor& dy, const std::vector<ResampledDim>& dims,
                                    const std::string& mode, bool align_corners, bool wide) {
  return resample_on_device(dy, dims, mode, align_corners, true, wide);
}

}  // namespace torchtp::spatial
#endif
