#include "spatial/pool_geometry.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "spatial/checks.h"
#include "spatial/pull.h"

namespace torchtp::spatial {
namespace {

void expand(const char* op, const char* name, std::vector<int64_t>& values, size_t count) {
  if (values.size() == 1) values.assign(count, values[0]);
  TORCH_CHECK_VALUE(values.size() == count, op, ": ", name, " needs one entry or ", count, ", got ", values.size());
}

}  // namespace

PoolGeometry::PoolGeometry(const char* op, at::IntArrayRef input_sizes, PoolParams params, std::vector<Cut> cuts)
    : num_dims_(static_cast<int64_t>(input_sizes.size())), params_(std::move(params)), cuts_(std::move(cuts)) {
  const size_t count = params_.kernel.size();
  TORCH_CHECK_VALUE(1 <= count && count <= 3, op, ": kernel_size needs one to three entries, got ", count);
  TORCH_CHECK_VALUE(num_spatial() < num_dims_, op, ": kernel_size has ", count, " entries, but the input only ",
                    num_dims_, " dims");
  if (params_.stride.empty()) params_.stride = params_.kernel;
  expand(op, "stride", params_.stride, count);
  expand(op, "padding", params_.padding, count);
  expand(op, "dilation", params_.dilation, count);
  output_sizes_ = frame_sizes_ = input_sizes.vec();
  std::vector<const Cut*> cut_of(count, nullptr);
  for (const Cut& cut : cuts_) {
    TORCH_CHECK_VALUE(cut.dim >= first_spatial(), op, ": dim ", cut.dim, " is not spatial; cut one of dims ",
                      first_spatial(), " to ", num_dims_ - 1);
    cut_of[cut.dim - first_spatial()] = &cut;
  }
  for (size_t i = 0; i < count; ++i) {
    const int64_t dim = first_spatial() + static_cast<int64_t>(i);
    const Window sliding = window(static_cast<int64_t>(i));
    TORCH_CHECK_VALUE(sliding.kernel > 0 && sliding.stride > 0 && sliding.dilation > 0, op,
                      ": kernel_size, stride and dilation must be positive, got ", sliding.kernel, ", ", sliding.stride,
                      " and ", sliding.dilation);
    TORCH_CHECK_VALUE(0 <= sliding.padding && sliding.padding <= (sliding.reach() + 1) / 2, op,
                      ": padding must be at least 0 and at most half the window, got ", sliding.padding,
                      " for a window of ", sliding.reach() + 1);
    const Cut* cut = cut_of[i];
    extents_.push_back(cut ? cut->extent : input_sizes[dim]);
    const int64_t outputs = output_extent(sliding, extents_[i], params_.ceil_mode);
    TORCH_CHECK(outputs > 0, op, ": a window of ", sliding.reach() + 1, " with padding ", sliding.padding,
                " does not fit into dim ", dim, " of global extent ", extents_[i]);
    outputs_.push_back(cut ? owned(outputs, cut->group.size, cut->group.rank) : Interval{0, outputs});
    frames_.push_back(cut ? read_by(outputs_[i], sliding) : Interval{0, extents_[i]});
    output_sizes_[dim] = outputs_[i].size();
    frame_sizes_[dim] = frames_[i].size();
  }
  nothing_ = std::find(output_sizes_.begin(), output_sizes_.end(), 0) != output_sizes_.end();
}

void PoolGeometry::check_backward(const char* op, at::IntArrayRef input_sizes, const at::Tensor& grad_output) const {
  check_shards(op, input_sizes, cuts_);
  check_sizes(op, "grad_output", grad_output, output_sizes_, grad_output);
}

Window PoolGeometry::window(int64_t index) const {
  return {params_.kernel[index], params_.stride[index], params_.padding[index], params_.dilation[index]};
}

PoolParams PoolGeometry::local() const {
  PoolParams params = params_;
  for (const Cut& cut : cuts_) params.padding[cut.dim - first_spatial()] = 0;
  return params;
}

std::vector<Interval> PoolGeometry::wanted(const Cut& cut) const {
  const Window sliding = window(cut.dim - first_spatial());
  std::vector<Interval> out = shards(cut, output_extent(sliding, cut.extent, params_.ceil_mode));
  for (Interval& interval : out) interval = read_by(interval, sliding);
  return out;
}

at::Tensor PoolGeometry::pull_frames(at::Tensor input, double fill) const {
  for (const Cut& cut : cuts_) {
    const auto all = wanted(cut);
    input = pull(input, cut, all, all[cut.group.rank], fill);
  }
  return input;
}

at::Tensor PoolGeometry::push_frames(at::Tensor grad) const {
  for (auto cut = cuts_.rbegin(); cut != cuts_.rend(); ++cut) {
    const auto all = wanted(*cut);
    const auto plan = cut->group.plans->get(cut->extent, cut->group.rank, all);
    if (plan->anyone_moves || !(all[cut->group.rank] == plan->own)) grad = push_add(grad, *cut, all);
  }
  return grad;
}

}  // namespace torchtp::spatial
