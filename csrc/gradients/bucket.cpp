#include "gradients/bucket.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/argmin.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "backend/label.h"
#include "gradients/moves.h"

namespace torchtp::gradients {
namespace {

// As a mark: of thousands of ranks one that has it shows in the mean, and fp16 holds it.
constexpr double kArrived = 16384;

// As the mark of a rank: one of both, or their sum.
constexpr int kFailed = 1;
constexpr int kHooksRaised = 2;

constexpr int64_t kAlignment = 64;  // bytes; every view starts on a cache line, and on an element of any dtype

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::vector<int64_t> rowmajor_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(sizes[dim], 1);
  return strides;
}

// An address in the memory of the first of `storages`, which live as long as it is in use.
c10::DataPtr hold(void* address, std::vector<c10::Storage> storages) {
  const c10::Device device = storages.front().device();
  return c10::InefficientStdFunctionContext::makeDataPtr(address, [held = std::move(storages)](void*) {}, device);
}

bool compresses(at::ScalarType dtype, Compression compression) {
  return compression != Compression::kNone && (dtype == at::kFloat || dtype == at::kDouble);
}

}  // namespace

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == at::kStrided && a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
         a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

Bucket::Bucket(const Collective& collective, std::vector<at::Tensor> parameters, std::string label, int num_ranks,
               const Options& options, std::shared_ptr<const SideStream> side)
    : side_(std::move(side)),
      num_ranks_(num_ranks),
      label_(std::move(label)),
      average_(options.average),
      size_(collective.size()) {
  const at::ScalarType dtype = c10::toRealValueType(parameters.front().scalar_type());
  const auto item_size = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t num_bytes = 0;
  for (const at::Tensor& parameter : parameters) {
    begins_.push_back(num_bytes / item_size);
    num_bytes = round_up(num_bytes + static_cast<int64_t>(parameter.nbytes()), kAlignment);
  }
  num_elements_ = num_bytes / item_size;
  const at::TensorOptions kind = parameters.front().options().requires_grad(false).dtype(dtype);
  flat_ = collective.allocate(num_elements_ + static_cast<int64_t>(parameters.size()) + 2 * num_ranks, kind);
  if (compresses(dtype, options.compression)) {
    const at::ScalarType travels_as = options.compression == Compression::kHalf ? at::kHalf : at::kBFloat16;
    compressed_ = collective.allocate(flat_.numel(), kind.dtype(travels_as));
  }
  for (size_t slot = 0; slot < parameters.size(); ++slot) {
    const at::Tensor& parameter = parameters[slot];
    const std::vector<int64_t> strides =
        parameter.is_non_overlapping_and_dense() ? parameter.strides().vec() : rowmajor_strides(parameter.sizes());
    views_.push_back(make_view(slot, parameter.options().requires_grad(false), parameter.sizes(), strides));
  }
  const bool asked =
      options.packing == Packing::kTogether || (options.packing == Packing::kByDevice && flat_.is_cuda());
  packs_ = asked && moves_together(flat_.device(), dtype, payload().scalar_type());
  if (side_->stream()) {
    flat_.record_stream(*side_->stream());
    if (compressed_.defined()) compressed_.record_stream(*side_->stream());
  }
}

std::byte* Bucket::begin_of(size_t slot) const {
  return static_cast<std::byte*>(flat_.data_ptr()) + begins_[slot] * flat_.element_size();
}

// With a storage of its own over its part of the buffer. Not a view in autograd's sense: such a gradient could not be
// detached in place.
at::Tensor Bucket::make_view(size_t slot, const at::TensorOptions& options, at::IntArrayRef sizes,
                             at::IntArrayRef strides) const {
  at::Tensor view = at::empty({0}, options);
  const size_t num_bytes = c10::multiply_integers(sizes) * view.element_size();
  const auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), num_bytes,
                                                             hold(begin_of(slot), {flat_.storage()}), nullptr, false);
  view.set_(c10::Storage(storage), 0, sizes, strides);
  return view;
}

void Bucket::let_go(size_t slot) {
  at::Tensor& view = views_[slot];
  if (view.use_count() == 1 && view.storage().use_count() == 1) return;
  note_writer();
  const at::Tensor copy = view.clone();
  // The buffer stays with it: what has read the address (numpy) may still have it.
  view.storage().set_data_ptr_noswap(hold(copy.data_ptr(), {copy.storage(), flat_.storage()}));
  view = make_view(slot, view.options(), view.sizes(), view.strides());
}

void Bucket::renew_views() {
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    at::Tensor& view = views_[slot];
    if (view.storage().data() == begin_of(slot)) continue;
    view = make_view(slot, view.options(), view.sizes(), view.strides());
  }
}

int64_t Bucket::num_bytes() const { return static_cast<int64_t>(payload().nbytes()); }

void Bucket::note_writer() {
  const auto stream = side_->current();
  if (stream && std::find(writers_.begin(), writers_.end(), *stream) == writers_.end()) writers_.push_back(*stream);
}

void Bucket::start(const Collective& collective, const std::vector<at::Tensor>& gradients,
                   const std::vector<bool>& arrived, bool failed) {
  std::vector<double> marks;
  for (size_t slot = 0; slot < gradients.size(); ++slot) {
    marks.push_back(!gradients[slot].defined() ? 0 : arrived[slot] ? kArrived : 1);
  }
  side_->follow(writers_);
  writers_.clear();
  const c10::OptionalStreamGuard on_side(side_->stream());
  if (failed && !flat_.is_cpu()) {
    for (const at::Tensor& view : views_) view.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  started_at_.reset();
  if (measures_) started_at_ = Instant::now(flat_.device());
  const backend::CallLabel label(label_);
  if (packs_) {
    start_packed(collective, gradients, marks, failed);
  } else {
    start_copied(collective, marks, failed);
  }
  done_at_.reset();
  if (measures_) {
    done_at_ = std::make_shared<LaterInstant>();
    // On a device the callback's current stream comes after the collective.
    work_->getFuture()->addCallback(
        [done_at = done_at_, device = flat_.device()](c10::ivalue::Future&) { done_at->set(Instant::now(device)); });
  }
}

void Bucket::start_copied(const Collective& collective, const std::vector<double>& marks, bool failed) {
  mark(flat_, marks, collective.rank(), failed, 1);
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
}

void Bucket::start_packed(const Collective& collective, const std::vector<at::Tensor>& gradients,
                          const std::vector<double>& marks, bool failed) {
  const bool divides = collective.divides_beforehand(flat_.device());
  const double scale = divides ? 1.0 / collective.size() : 1;
  pack(failed ? views_ : gradients, scale);
  mark(payload(), marks, collective.rank(), failed, scale);
  work_ = divides ? collective.start_sum(payload()) : collective.start_mean(payload());
}

// The gradients, scaled, into what travels: one launch, but for gradients whose memory is in another order.
void Bucket::pack(const std::vector<at::Tensor>& gradients, double scale) {
  const bool moves_views = compressed_.defined() || scale != 1;
  std::vector<Move> moves;
  for (size_t slot = 0; slot < gradients.size(); ++slot) {
    const at::Tensor& gradient = gradients[slot];
    const at::Tensor& view = views_[slot];
    const bool elsewhere = gradient.defined() && !is_same_memory(gradient, view);
    // Its owner may let go of it as soon as this returns.
    if (elsewhere && side_->stream()) gradient.record_stream(*side_->stream());
    if (elsewhere && gradient.strides() == view.strides() && !gradient.is_conj() && !gradient.is_neg()) {
      moves.push_back({gradient, begins_[slot]});
      continue;
    }
    if (!gradient.defined()) {
      view.zero_();
    } else if (elsewhere) {
      view.copy_(gradient);
    }
    if (moves_views) moves.push_back({view, begins_[slot]});
  }
  gradients::pack(moves, payload(), scale);
}

// The parameters' marks, scaled, and for this rank what has failed, and how many gradients it had kept.
void Bucket::mark(const at::Tensor& buffer, const std::vector<double>& marks, int rank, bool failed,
                  double scale) const {
  const auto num_slots = static_cast<int64_t>(marks.size());
  const at::Tensor places = buffer.narrow(0, num_elements_, num_slots);
  places.fill_(kArrived * scale);  // mostly all have
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (marks[slot] != kArrived) places.select(0, slot).fill_(marks[slot] * scale);
  }
  if (num_ranks_ == 0) return;
  const at::Tensor of_ranks = buffer.narrow(0, num_elements_ + num_slots, 2 * num_ranks_);
  of_ranks.zero_();
  const int told = (failed ? kFailed : 0) + (hooks_raised_ ? kHooksRaised : 0);
  if (told != 0) of_ranks.select(0, rank).fill_(told * scale);
  if (num_kept_ != 0) of_ranks.select(0, num_ranks_ + rank).fill_(num_kept_ * scale);
}

void Bucket::wait(const Collective& collective) {
  {
    const c10::OptionalStreamGuard on_side(side_->stream());
    const auto work = std::exchange(work_, nullptr);
    work->wait();
    const double scale = average_ ? 1 : collective.size();
    if (compressed_.defined() && packs_) {
      unpack({{flat_, 0}}, compressed_, scale);
    } else {
      if (compressed_.defined()) flat_.copy_(compressed_);
      if (!average_) flat_.mul_(scale);
    }
  }
  side_->lead();
}

double Bucket::marked(size_t slot) const {
  const double found = flat_.select(0, num_elements_ + static_cast<int64_t>(slot)).item<double>();
  return average_ ? found : found / size_;
}

bool Bucket::present_somewhere(size_t slot) const { return marked(slot) > 0; }

bool Bucket::arrived_somewhere(size_t slot) const { return marked(slot) > 1.5; }

std::vector<int> Bucket::ranks_that_told(int what) const {
  std::vector<int> ranks;
  if (!flat_.is_cpu()) return ranks;
  const auto first = num_elements_ + static_cast<int64_t>(views_.size());
  const at::Tensor marks = flat_.narrow(0, first, num_ranks_).to(at::kDouble);
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    const double found = marks.const_data_ptr<double>()[rank];
    const int64_t told = std::llround(average_ ? found * size_ : found);
    if ((told & what) != 0) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

std::vector<int> Bucket::failed_ranks() const { return ranks_that_told(kFailed); }

std::vector<int> Bucket::ranks_whose_hooks_raised() const { return ranks_that_told(kHooksRaised); }

std::optional<std::pair<int, int>> Bucket::ranks_that_kept_others() const {
  if (!flat_.is_cpu() || num_ranks_ == 0) return std::nullopt;
  const auto first = num_elements_ + static_cast<int64_t>(views_.size()) + num_ranks_;
  const at::Tensor kept = flat_.narrow(0, first, num_ranks_);
  const auto most = static_cast<int>(kept.argmax().item<int64_t>());
  const auto least = static_cast<int>(kept.argmin().item<int64_t>());
  const auto fewest = kept[least].item<double>();
  if (fewest < 0 || fewest == kept[most].item<double>()) return std::nullopt;
  return std::pair{most, least};
}

}  // namespace torchtp::gradients
