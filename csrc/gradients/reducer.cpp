#include "gradients/reducer.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>

#include "gradients/agreement.h"
#include "gradients/bucket_plan.h"

namespace torchtp::gradients {
namespace {

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == at::kStrided && a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
         a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

void check_plain(const at::Tensor& parameter, const std::string& name) {
  TORCH_CHECK_TYPE(parameter.layout() == at::kStrided && !parameter.key_set().has(c10::DispatchKey::Python),
                   "gradients: parameter '", name,
                   "' must be a plain dense tensor; gradients of DTensor parameters are reduced by who made them");
  TORCH_CHECK_VALUE(parameter.is_leaf(), "gradients: parameter '", name,
                    "' must be a leaf, but it was computed from other tensors");
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                         const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Options& options) {
  const auto reducer = std::make_shared<Reducer>(std::move(parameters), std::move(names), group, options);
  reducer->prepare();
  return reducer;
}

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Options& options)
    : collective_(group), options_(options) {
  check_agreement(collective_, parameters, names, options);
  TORCH_CHECK_VALUE(!parameters.empty(), "gradients: there is no parameter to reduce; pass at least one");
  for (size_t i = 0; i < parameters.size(); ++i) {
    check_plain(parameters[i], names[i]);
    parameters_.push_back({std::move(parameters[i]), std::move(names[i]), {}});
  }
}

void Reducer::set_sync(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  sync_ = on;
}

bool Reducer::sync() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sync_;
}

void Reducer::set_interval(int64_t num_backwards) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(num_backwards >= 1, "gradients: at least every 1st backward reduces, but the interval is ",
                    num_backwards);
  interval_ = num_backwards;
  num_local_ = 0;
}

int64_t Reducer::num_unreduced() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_local_;
}

void Reducer::reduce() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (collective_.size() == 1) return;
  TORCH_CHECK(!in_pass_, "gradients: reduce() must be called outside backward, which reduces by itself");
  settle();
  if (!trains()) return;
  begin();
  finish_or_tell();
}

void Reducer::prepare() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (in_pass_) return;
  settle();
  follow_freezing();
}

void Reducer::follow_freezing() {
  if (collective_.size() == 1) return;  // every gradient is its own mean
  bool changed = false;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    Parameter& parameter = parameters_[index];
    const bool trained = parameter.tensor.requires_grad();
    changed = changed || trained != parameter.travels;
    if (trained && !parameter.accumulator) parameter.accumulator = listen(parameter.tensor, index, weak_from_this());
  }
  // Gradients stay in the old buckets' memory until the next pass plans new ones.
  if (changed) buckets_.clear();
}

void Reducer::watch(const at::Tensor& output) {
  if (collective_.size() > 1) listen_to_output(output, weak_from_this());
}

void Reducer::record(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  records_ = on;
}

void Reducer::reset_statistics() {
  std::lock_guard<std::mutex> lock(mutex_);
  statistics_ = {};
}

Statistics Reducer::statistics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Statistics statistics = statistics_;
  statistics.num_buckets = static_cast<int64_t>(buckets_.size());
  return statistics;
}

std::vector<Event> Reducer::events() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return events_;
}

std::vector<std::vector<std::string>> Reducer::bucket_names() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::vector<std::string>> names;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    names.emplace_back();
    for (const size_t index : members_[bucket]) names.back().push_back(parameters_[index].name);
  }
  return names;
}

bool Reducer::holds_gradient(size_t index) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Parameter& parameter = parameters_.at(index);
  const at::Tensor& gradient = parameter.tensor.grad();
  return !buckets_.empty() && parameter.travels && gradient.defined() &&
         is_same_memory(gradient, buckets_[parameter.bucket].view(parameter.slot));
}

void Reducer::before_accumulation() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (in_pass_) return;
  settle();
  if (!sync_ || !trains() || is_between()) return;
  begin();
  in_pass_ = true;
  begin_backward(weak_from_this());
}

bool Reducer::trains() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const Parameter& parameter) { return parameter.tensor.requires_grad(); });
}

bool Reducer::is_between() {
  if (interval_ == 1) return false;
  const int task = current_backward();
  if (task != last_task_) ++num_local_;
  last_task_ = task;
  return num_local_ < interval_;
}

void Reducer::before_output() {
  std::vector<Accumulator> accumulators;
  for (const Parameter& parameter : parameters_) {
    if (parameter.accumulator) accumulators.push_back(parameter.accumulator);
  }
  if (accumulates_into(accumulators)) before_accumulation();
}

void Reducer::begin() {
  next_bucket_ = 0;
  events_.clear();
  order_.clear();
  num_missing_.assign(buckets_.size(), 0);
  for (Parameter& parameter : parameters_) {
    const bool trained = parameter.tensor.requires_grad();
    TORCH_CHECK(!trained || (parameter.accumulator && (parameter.travels || buckets_.empty())),
                "gradients: parameter '", parameter.name,
                "' was frozen before and is trained now; call prepare() before forward on every rank");
    parameter.ready = !trained;
    parameter.with_graph.reset();
    if (trained && parameter.travels && !buckets_.empty()) ++num_missing_[parameter.bucket];
  }
}

void Reducer::after_accumulation(size_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!in_pass_) return;
  Parameter& parameter = parameters_[index];
  note(Event::Kind::kReady, index);
  if (buckets_.empty()) {
    if (!parameter.ready) order_.push_back(static_cast<int64_t>(index));
    parameter.ready = true;
    return;
  }
  TORCH_CHECK(parameter.bucket >= next_bucket_, "gradients: parameter '", parameter.name,
              "' got a second gradient in one backward when the first had already left; a parameter shared by parts "
              "that are checkpointed needs checkpoint(use_reentrant=False)");
  stow(parameter);
  if (parameter.ready) return;
  parameter.ready = true;
  --num_missing_[parameter.bucket];
  start_ready();
}

// Puts the gradient into its bucket, if it is not there: one copy after zero_grad(set_to_none=True), none otherwise.
void Reducer::stow(Parameter& parameter) {
  const at::Tensor& view = buckets_[parameter.bucket].view(parameter.slot);
  at::Tensor& own = gradient(parameter);
  at::NoGradGuard no_grad;
  if (!own.defined()) {
    view.zero_();
    return;
  }
  if (is_same_memory(own, view)) return;
  TORCH_CHECK(own.layout() == at::kStrided && own.scalar_type() == view.scalar_type() && own.sizes() == view.sizes() &&
                  own.device() == view.device(),
              "gradients: the gradient of parameter '", parameter.name, "' must be dense ",
              c10::toString(view.scalar_type()), " ", view.sizes(), " on ", view.device(), ", but it is ", own.layout(),
              " ", c10::toString(own.scalar_type()), " ", own.sizes(), " on ", own.device(),
              "; sparse gradients and parameters changed after the reducer was made are not supported");
  view.copy_(own);
  if (own.grad_fn()) {
    parameter.with_graph = own;
  } else {
    own = view;
  }
}

void Reducer::start_ready() {
  while (next_bucket_ < buckets_.size() && num_missing_[next_bucket_] == 0) start(next_bucket_, false);
}

void Reducer::start_rest(bool failed) {
  while (next_bucket_ < buckets_.size()) start(next_bucket_, failed);
}

void Reducer::start(size_t index, bool failed) {
  at::NoGradGuard no_grad;
  const std::vector<size_t>& members = members_[index];
  std::vector<bool> present(members.size());
  for (size_t slot = 0; slot < members.size(); ++slot) {
    Parameter& parameter = parameters_[members[slot]];
    present[slot] = gradient(parameter).defined();
    if (!failed && (!parameter.ready || !present[slot])) stow(parameter);
  }
  note(Event::Kind::kStart, index);
  buckets_[index].measure(records_);
  next_bucket_ = index + 1;
  buckets_[index].start(collective_, present, failed);
  statistics_.num_bytes += buckets_[index].num_bytes();
}

// The order of rank 0, and what the buckets are from now on.
void Reducer::plan() {
  std::vector<bool> seen(parameters_.size(), false);
  for (const int64_t index : order_) seen[index] = true;
  std::vector<Traveller> travellers;
  for (Parameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    parameter.travels = tensor.requires_grad();
    travellers.push_back(
        {static_cast<int64_t>(tensor.nbytes()),
         std::string(c10::toString(c10::toRealValueType(tensor.scalar_type()))) + " " + tensor.device().str()});
  }
  // Those that got none come last, from the last one on, as in most backwards.
  for (size_t index = parameters_.size(); index-- > 0;) {
    if (!seen[index] && parameters_[index].travels) order_.push_back(static_cast<int64_t>(index));
  }
  order_ = take_order(collective_, order_, parameters_.front().tensor.device());
  members_ = plan_buckets(travellers, order_, options_.first_bucket_bytes, options_.bucket_bytes);
  std::vector<Bucket> buckets;
  for (size_t index = 0; index < members_.size(); ++index) {
    std::vector<at::Tensor> tensors;
    for (size_t slot = 0; slot < members_[index].size(); ++slot) {
      Parameter& parameter = parameters_[members_[index][slot]];
      parameter.bucket = index;
      parameter.slot = slot;
      // Stowed with the others when the bucket starts.
      parameter.ready = false;
      tensors.push_back(parameter.tensor);
    }
    const bool is_last = index + 1 == members_.size();
    buckets.emplace_back(collective_, std::move(tensors), is_last ? collective_.size() : 0, options_);
  }
  buckets_ = std::move(buckets);
  next_bucket_ = 0;
}

void Reducer::end_of_backward(bool nested) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!in_pass_) return;
  if (nested) {
    TORCH_WARN_ONCE(
        "gradients: a backward inside a backward (checkpoint with use_reentrant=True) reduces all gradients each time; "
        "use checkpoint(use_reentrant=False), or have the reducer watch the model's output");
  }
  in_pass_ = false;
  finish_or_tell();
}

void Reducer::finish_or_tell() {
  num_local_ = 0;
  try {
    finish();
  } catch (...) {
    failed_ = true;
    tell_failure();
    throw;
  }
}

void Reducer::finish() {
  at::NoGradGuard no_grad;
  note(Event::Kind::kEndOfBackward, 0);
  const int64_t end = steady_nanoseconds();
  if (buckets_.empty()) plan();
  start_rest(false);
  for (size_t index = 0; index < buckets_.size(); ++index) {
    buckets_[index].wait(collective_);
    note(Event::Kind::kDone, index);
  }
  for (Parameter& parameter : parameters_) {
    if (parameter.travels) hand_out(parameter);
  }
  ++statistics_.num_backwards;
  if (records_) measure(end);
  const std::vector<int> failures = buckets_.back().failed_ranks();
  TORCH_CHECK(failures.empty(), "gradients: backward raised an exception on rank ", failures.front(),
              ", so the gradients of this backward are not those of the whole batch; zero them before the next one");
}

void Reducer::hand_out(Parameter& parameter) {
  const Bucket& bucket = buckets_[parameter.bucket];
  const at::Tensor& view = bucket.view(parameter.slot);
  at::Tensor& own = gradient(parameter);
  if (parameter.with_graph.defined()) {
    // The value is the mean, the graph this rank's own: by the mean rule the mean of what the ranks then hand out is
    // the gradient through all of them.
    at::AutoGradMode with_grad(true);
    own = view.clone() + (parameter.with_graph - parameter.with_graph.detach());
    parameter.with_graph.reset();
  } else if (!own.defined() && bucket.present_somewhere(parameter.slot)) {
    own = view;
  }
}

void Reducer::abandoned_backward() noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!in_pass_) return;
  in_pass_ = false;
  failed_ = true;
  tell_failure();
}

void Reducer::tell_failure() noexcept {
  if (buckets_.empty()) return;  // settle() will
  try {
    start_rest(true);
  } catch (const std::exception& error) {
    TORCH_WARN("gradients: after an exception in backward the other ranks could not be told: ", error.what());
  }
}

void Reducer::settle() {
  if (!failed_) return;
  at::NoGradGuard no_grad;
  failed_ = false;
  if (buckets_.empty()) {
    plan();
    start_rest(true);
  }
  for (Bucket& bucket : buckets_) {
    if (bucket.started()) bucket.wait(collective_);
  }
}

void Reducer::note(Event::Kind kind, size_t index) {
  if (records_) events_.push_back({kind, index});
}

void Reducer::measure(int64_t end_of_backward) {
  std::vector<Span> spans;
  for (const Bucket& bucket : buckets_) {
    // Without an answer from the work's future the span ended by now.
    spans.push_back({bucket.started_at(), bucket.done_at() > 0 ? bucket.done_at() : steady_nanoseconds()});
  }
  const Coverage coverage = cover(std::move(spans), end_of_backward);
  statistics_.communication_seconds += coverage.all;
  statistics_.hidden_seconds += coverage.before_limit;
}

}  // namespace torchtp::gradients
