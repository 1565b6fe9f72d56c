#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "spatial/cut.h"

namespace torchtp::spatial {

// The numbers of a pooling: one entry for each spatial dim; lists may also have one entry for all, and an empty stride
// means the kernel's.
struct PoolParams {
  std::vector<int64_t> kernel, stride, padding, dilation;
  bool ceil_mode = false;
};

// Windows of a pooling over a tensor whose last dims are spatial (one for each entry of kernel), some of them cut.
// Everything it throws is thrown on all ranks alike: it looks only at what they share.
class PoolGeometry {
 public:
  PoolGeometry(const char* op, at::IntArrayRef input_sizes, PoolParams params, std::vector<Cut> cuts);

  // Throws, on this rank alone, where the local sizes are not what it owns.
  void check_backward(const char* op, at::IntArrayRef input_sizes, const at::Tensor& grad_output) const;

  int64_t num_spatial() const { return static_cast<int64_t>(params_.kernel.size()); }
  int64_t first_spatial() const { return num_dims_ - num_spatial(); }
  // By spatial dim (0 = first).
  Window window(int64_t index) const;
  int64_t extent(int64_t index) const { return extents_[index]; }    // global, of the input
  Interval outputs(int64_t index) const { return outputs_[index]; }  // own, global coordinates
  Interval frame(int64_t index) const { return frames_[index]; }     // input rows the local pooling reads

  std::vector<int64_t> output_sizes() const { return output_sizes_; }
  std::vector<int64_t> frame_sizes() const { return frame_sizes_; }
  // No output here: no row, or no image or channel, whose pooling ATen refuses.
  bool nothing() const { return nothing_; }
  // What the local pooling over the frames needs: no padding on cut dims, there it is in the frame.
  PoolParams local() const;

  // The rows of all frames, `fill` where they overhang. Collective.
  at::Tensor pull_frames(at::Tensor input, double fill) const;
  // The adjoint: own rows. Collective.
  at::Tensor push_frames(at::Tensor grad) const;

 private:
  std::vector<Interval> wanted(const Cut& cut) const;

  int64_t num_dims_;
  PoolParams params_;
  std::vector<Cut> cuts_;
  std::vector<int64_t> extents_;
  std::vector<Interval> outputs_, frames_;
  std::vector<int64_t> output_sizes_, frame_sizes_;
  bool nothing_ = false;
};

}  // namespace torchtp::spatial
