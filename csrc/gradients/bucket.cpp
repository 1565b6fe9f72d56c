#include "gradients/bucket.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

namespace torchtp::gradients {
namespace {

constexpr int64_t kAlignment = 64;  // bytes; every view starts on a cache line, and on an element of any dtype

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::vector<int64_t> rowmajor_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(sizes[dim], 1);
  return strides;
}

bool compresses(at::ScalarType dtype, Compression compression) {
  return compression != Compression::kNone && (dtype == at::kFloat || dtype == at::kDouble);
}

}  // namespace

int64_t steady_nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

Bucket::Bucket(const Collective& collective, std::vector<at::Tensor> parameters, int num_ranks, const Options& options)
    : average_(options.average) {
  const at::ScalarType dtype = c10::toRealValueType(parameters.front().scalar_type());
  const auto item_size = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t num_bytes = 0;
  std::vector<int64_t> begins;
  for (const at::Tensor& parameter : parameters) {
    begins.push_back(num_bytes);
    num_bytes = round_up(num_bytes + static_cast<int64_t>(parameter.nbytes()), kAlignment);
  }
  const int64_t num_elements = num_bytes / item_size;
  const auto num_marks = static_cast<int64_t>(parameters.size());
  const at::TensorOptions kind = parameters.front().options().requires_grad(false).dtype(dtype);
  flat_ = collective.allocate(num_elements + num_marks + num_ranks, kind);
  marks_ = flat_.narrow(0, num_elements, num_marks);
  failures_ = flat_.narrow(0, num_elements + num_marks, num_ranks);
  if (compresses(dtype, options.compression)) {
    const at::ScalarType travels_as = options.compression == Compression::kHalf ? at::kHalf : at::kBFloat16;
    compressed_ = collective.allocate(flat_.numel(), kind.dtype(travels_as));
  }
  for (size_t slot = 0; slot < parameters.size(); ++slot) {
    const at::Tensor& parameter = parameters[slot];
    const std::vector<int64_t> strides =
        parameter.is_non_overlapping_and_dense() ? parameter.strides().vec() : rowmajor_strides(parameter.sizes());
    const auto offset = begins[slot] / static_cast<int64_t>(parameter.element_size());
    // Not a view in autograd's sense: such a gradient could not be detached in place.
    at::Tensor view = at::empty({0}, parameter.options().requires_grad(false));
    view.set_(flat_.storage(), offset, parameter.sizes(), strides);
    views_.push_back(std::move(view));
  }
}

int64_t Bucket::num_bytes() const {
  return static_cast<int64_t>(compressed_.defined() ? compressed_.nbytes() : flat_.nbytes());
}

void Bucket::start(const Collective& collective, const std::vector<bool>& present, bool failed) {
  marks_.fill_(1);
  for (size_t slot = 0; slot < present.size(); ++slot) {
    if (!present[slot]) marks_.select(0, static_cast<int64_t>(slot)).zero_();
  }
  if (failures_.numel() > 0) {
    failures_.zero_();
    if (failed) failures_.select(0, collective.rank()).fill_(1);
  }
  if (failed && !flat_.is_cpu()) flat_.fill_(std::numeric_limits<double>::quiet_NaN());
  if (measures_) started_at_ = steady_nanoseconds();
  if (!compressed_.defined()) {
    work_ = collective.start_mean(flat_);
  } else if (collective.divides_beforehand(flat_.device())) {
    // Divided before it is rounded: a sum of fp16 must not overflow where the mean would not.
    at::mul_out(compressed_, flat_, at::scalar_tensor(1.0 / collective.size(), flat_.options()));
    work_ = collective.start_sum(compressed_);
  } else {
    compressed_.copy_(flat_);
    work_ = collective.start_mean(compressed_);
  }
  done_at_.reset();
  if (measures_) {
    done_at_ = std::make_shared<std::atomic<int64_t>>(0);
    work_->getFuture()->addCallback([done_at = done_at_](c10::ivalue::Future&) { *done_at = steady_nanoseconds(); });
  }
}

void Bucket::wait(const Collective& collective) {
  const auto work = std::exchange(work_, nullptr);
  work->wait();
  if (compressed_.defined()) flat_.copy_(compressed_);
  if (!average_) flat_.mul_(collective.size());
}

bool Bucket::present_somewhere(size_t slot) const {
  return marks_.select(0, static_cast<int64_t>(slot)).item<double>() > 0;
}

std::vector<int> Bucket::failed_ranks() const {
  std::vector<int> ranks;
  if (!failures_.is_cpu()) return ranks;
  for (int64_t rank = 0; rank < failures_.numel(); ++rank) {
    if (failures_.select(0, rank).item<double>() > 0) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace torchtp::gradients
