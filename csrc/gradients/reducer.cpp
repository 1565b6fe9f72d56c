#include "gradients/reducer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "backend/signal_handlers.h"
#include "gradients/agreement.h"
#include "gradients/moves.h"

namespace torchtp::gradients {
namespace {

bool is_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device() && a.sizes() == b.sizes();
}

void check_plain(const at::Tensor& parameter, const std::string& name) {
  TORCH_CHECK_TYPE(parameter.layout() == at::kStrided && !parameter.key_set().has(c10::DispatchKey::Python),
                   "gradients: parameter '", name,
                   "' must be a plain dense tensor; gradients of DTensor parameters are reduced by who made them");
  TORCH_CHECK_VALUE(!parameter.is_meta(), "gradients: parameter '", name,
                    "' is on the device meta and has no data yet: make the reducer when it has (module.to_empty(...))");
  TORCH_CHECK_VALUE(parameter.is_leaf(), "gradients: parameter '", name,
                    "' must be a leaf, but it was computed from other tensors");
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                         const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Options& options,
                                         OwnHook own_hook) {
  const auto reducer =
      std::make_shared<Reducer>(std::move(parameters), std::move(names), group, options, std::move(own_hook));
  reducer->prepare();
  return reducer;
}

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Options& options, OwnHook own_hook)
    : collective_(group), options_(options), own_hook_(std::move(own_hook)) {
  check_agreement(collective_, parameters, names, options);
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters_.emplace_back();
    parameter.tensor = std::move(parameters[i]);
    parameter.name = std::move(names[i]);
  }
}

void Reducer::check(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                    const Options& options) {
  TORCH_CHECK_VALUE(!parameters.empty(), "gradients: there is no parameter to reduce; pass at least one");
  TORCH_CHECK_VALUE(options.bucket_bytes >= 0 && options.first_bucket_bytes >= 0,
                    "gradients: bucket_bytes and first_bucket_bytes are least sizes in bytes, but they are ",
                    options.bucket_bytes, " and ", options.first_bucket_bytes,
                    "; 0 gives each parameter a bucket of its own");
  for (size_t i = 0; i < parameters.size(); ++i) check_plain(parameters[i], names[i]);
}

void Reducer::set_sync(bool on) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  sync_ = on;
}

bool Reducer::sync() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return sync_;
}

void Reducer::set_interval(int64_t num_backwards) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK_VALUE(num_backwards >= 1, "gradients: at least every 1st backward reduces, but the interval is ",
                    num_backwards);
  interval_ = num_backwards;
  num_local_ = 0;
}

int64_t Reducer::num_passes() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return num_passes_;
}

int64_t Reducer::num_unreduced() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return num_local_;
}

void Reducer::reduce() {
  backend::refuse_in_signal_handler("reduce()");
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (collective_.size() == 1) return;
  TORCH_CHECK(!in_pass_, "gradients: reduce() must be called outside backward, which reduces by itself");
  settle();
  if (!trains()) return;
  begin();
  num_kept_ = -1;  // ranks may have been given gradients of their own
  finish_or_tell();
}

void Reducer::count_pass() {
  ++num_passes_;
  num_local_ = 0;
  has_local_ = is_alike_ = false;
}

// Of gradients that all have alike after a pass: a rank that zeroes them alone would halve those of the others.
void Reducer::count_kept() {
  if (has_local_) return;
  num_kept_ = -1;
  if (!is_alike_) return;
  num_kept_ = std::count_if(parameters_.begin(), parameters_.end(),
                            [](const Parameter& each) { return each.travels && each.tensor.grad().defined(); });
}

void Reducer::check_kept() const {
  const auto apart = buckets_.back().ranks_that_kept_others();
  TORCH_CHECK_VALUE(!apart, "gradients: rank ", apart->first, " had gradients of the last backward that rank ",
                    apart->second, " had zeroed, so their mean is that of no batch; call zero_grad on all ranks alike");
}

std::optional<at::Tensor> Reducer::clip_norm(double most) {
  backend::refuse_in_signal_handler("clip_grad_norm_()");
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(!in_pass_, "gradients: gradients are clipped outside backward, when it has reduced them");
  if (!is_planned()) return std::nullopt;
  std::vector<at::Tensor> buffers;
  for (const Bucket& bucket : buckets_) {
    buffers.push_back(bucket.gradients());
    if (!bucket.packs() || buffers.back().device() != buffers.front().device()) return std::nullopt;
  }
  for (Parameter& parameter : parameters_) {
    const at::Tensor& own = gradient(parameter);
    if (!own.defined()) continue;
    if (!parameter.travels || !is_same_memory(own, buckets_[parameter.bucket].view(parameter.slot)))
      return std::nullopt;
  }
  at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters_) {
    if (!parameter.travels || gradient(parameter).defined()) continue;
    buckets_[parameter.bucket].let_go(parameter.slot);  // who has set a gradient aside keeps its numbers
    buckets_[parameter.bucket].view(parameter.slot).zero_();
  }
  const at::Tensor found = norm_and_factor(buffers, most);
  for (at::Tensor& buffer : buffers) buffer.mul_(found.select(0, 1));
  return found.select(0, 0);
}

void Reducer::prepare() {
  backend::refuse_in_signal_handler("prepare()");
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (in_pass_) return;
  settle();
  listen_to_parameters();
}

void Reducer::listen_to_parameters() {
  if (collective_.size() == 1) return;  // every gradient is its own mean
  for (size_t index = 0; index < parameters_.size(); ++index) {
    Parameter& parameter = parameters_[index];
    if (!may_train(parameter.tensor)) continue;
    parameter.accumulator = listen(parameter.tensor, index, weak_from_this(), parameter.accumulator);
    if (watches_) listen_first(parameter.tensor, parameter.accumulator, weak_from_this());
  }
}

const Reducer::Parameter* Reducer::changed() const {
  const auto has_changed = [this](const Parameter& parameter) {
    if (parameter.tensor.requires_grad() != parameter.travels) return true;
    return parameter.travels && !is_alike(parameter.tensor, buckets_[parameter.bucket].view(parameter.slot));
  };
  const auto found = std::find_if(parameters_.begin(), parameters_.end(), has_changed);
  return found == parameters_.end() ? nullptr : &*found;
}

bool Reducer::is_planned() const { return !buckets_.empty() && changed() == nullptr; }

void Reducer::follow_parameters() {
  if (buckets_.empty()) return;
  const Parameter* const parameter = changed();
  if (parameter == nullptr) return;
  planned_anew_for_ = parameter->name;
  buckets_.clear();  // gradients stay in their memory until new ones are planned
}

void Reducer::watch(const at::Tensor& output) {
  if (collective_.size() == 1) return;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    const bool watched_before = std::exchange(watches_, true);
    if (!watched_before) listen_to_parameters();
  }
  listen_to_output(output, weak_from_this());
}

void Reducer::record(bool on) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  records_ = on;
}

void Reducer::reset_statistics() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  statistics_ = {};
}

Statistics Reducer::statistics() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  Statistics statistics = statistics_;
  statistics.num_buckets = is_planned() ? static_cast<int64_t>(buckets_.size()) : 0;
  return statistics;
}

std::vector<Event> Reducer::events() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return events_;
}

std::vector<std::vector<std::string>> Reducer::bucket_names() const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<std::vector<std::string>> names;
  if (!is_planned()) return names;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    names.emplace_back();
    for (const size_t index : members_[bucket]) names.back().push_back(parameters_[index].name);
  }
  return names;
}

bool Reducer::holds_gradient(size_t index) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const Parameter& parameter = parameters_.at(index);
  const at::Tensor& gradient = parameter.tensor.grad();
  return is_planned() && parameter.travels && gradient.defined() &&
         is_same_memory(gradient, buckets_[parameter.bucket].view(parameter.slot));
}

void Reducer::note(Event::Kind kind, size_t index) {
  if (records_) events_.push_back({kind, index});
}

Instant Reducer::now() const { return Instant::now(parameters_.front().tensor.device()); }

void Reducer::measure() {
  std::vector<Span> spans;
  const Instant last = now();
  for (const Bucket& bucket : buckets_) {
    if (!bucket.started_at()) continue;  // recording began with this pass under way
    // Without an answer from the work's future the span ended by now.
    const Instant done = bucket.done_at().value_or(last);
    spans.push_back({bucket.started_at()->after(begin_), done.after(begin_)});
  }
  const Coverage coverage = cover(std::move(spans), end_of_backward_.after(begin_));
  statistics_.communication_seconds += coverage.all;
  statistics_.hidden_seconds += coverage.before_limit;
}

}  // namespace torchtp::gradients
