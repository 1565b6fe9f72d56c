#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "spatial/cut.h"

namespace torchtp::spatial {

// What F.interpolate was asked for: one output size and one scale (0: from the sizes) for each spatial dim, global.
// `mode` is nearest, nearest-exact, linear (of as many dims as there are) or cubic; the last two also with -antialias.
struct InterpolateParams {
  std::string mode;
  std::vector<int64_t> output_size;
  std::vector<double> scales;
  bool align_corners = false;
};

// Own rows of the resampled tensor; taps lie at the global coordinates, as in ATen.
at::Tensor interpolate(const at::Tensor& input, const InterpolateParams& params, const std::vector<Cut>& cuts);

// The adjoint: own rows of the input's gradient. `input_sizes` are local.
at::Tensor interpolate_backward(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                const InterpolateParams& params, const std::vector<Cut>& cuts);

// Throws where sizes do not fit; the first two are this rank's.
void check_interpolate_backward(const at::Tensor& grad_output, at::IntArrayRef input_sizes,
                                const InterpolateParams& params, const std::vector<Cut>& cuts);

// Local sizes of the output.
std::vector<int64_t> interpolate_sizes(at::IntArrayRef input_sizes, const InterpolateParams& params,
                                       const std::vector<Cut>& cuts);

}  // namespace torchtp::spatial
