#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "gradients/agreement.h"
#include "gradients/bucket_plan.h"
#include "gradients/reducer.h"

// What a pass does; see NOTE [passes].
namespace torchtp::gradients {

void Reducer::before_accumulation() {
  bool shares = false;
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (in_pass_ || in_between_) return;
    settle();
    count_kept();
    if (!sync_ || !trains()) return;
    if (is_between()) {
      in_between_ = true;
      begin_backward(weak_from_this());
      return;
    }
    begin();
    in_pass_ = true;
    begin_backward(weak_from_this());
    shares = shared() != nullptr;
  }
  if (shares) refuse_shared();
  hold_hooks();
}

const Reducer::Parameter* Reducer::shared() const {
  const Parameter* found = nullptr;
  for (const Parameter& parameter : parameters_) {
    const bool trained = parameter.accumulator && parameter.tensor.requires_grad();
    if (trained && !listen_last(parameter.accumulator, this) && !found) found = &parameter;
  }
  return found;
}

// What one has under way the other would take for this rank's gradient.
void Reducer::refuse_shared() const {
  collect_garbage();  // one that is gone, but for cycles
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const Parameter* const parameter = shared();
  TORCH_CHECK_VALUE(
      !parameter, "gradients: parameter '", parameter->name,
      "' has two reducers (a GradientReducer, a DistributedOptimizer, a module that was parallelized), "
      "each of which would reduce what the other has under way: give all parameters of both to one GradientReducer and "
      "leave optimizers plain, or parallelize with reduce=False; drop one that is not used any more");
}

// Without the mutex, since it takes Python's lock.
void Reducer::hold_hooks() {
  const bool of_gradient = watches_ && !has_local_ && !at::GradMode::is_enabled();
  for (Parameter& parameter : parameters_) {
    if (parameter.tensor.requires_grad()) {
      parameter.hooks = HeldHooks::of(parameter.tensor, of_gradient, own_hook_);
    }
  }
}

std::vector<std::unique_ptr<HeldHooks>> Reducer::hooks_to_run() {
  std::vector<std::unique_ptr<HeldHooks>> hooks;
  for (const size_t index : arrivals_) {
    if (parameters_[index].hooks) hooks.push_back(std::move(parameters_[index].hooks));
  }
  for (Parameter& parameter : parameters_) {
    auto held = std::move(parameter.hooks);
    if (!held || !parameter.travels) continue;
    // Where only others' batches have reached it too: a step that some ranks do not take would part them.
    if (buckets_[parameter.bucket].arrived_somewhere(parameter.slot)) hooks.push_back(std::move(held));
  }
  return hooks;
}

void Reducer::release_hooks() noexcept {
  for (Parameter& parameter : parameters_) parameter.hooks.reset();
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
  if (records_) begin_ = now();
  follow_parameters();
  for (Bucket& bucket : buckets_) bucket.renew_views();
  next_bucket_ = 0;
  events_.clear();
  order_.clear();
  arrivals_.clear();
  // Unless it has been given up since.
  has_local_ = has_local_ && std::any_of(parameters_.begin(), parameters_.end(),
                                         [](const Parameter& each) { return each.tensor.grad().defined(); });
  count_kept();
  num_missing_.assign(buckets_.size(), 0);
  for (Parameter& parameter : parameters_) {
    const bool trained = parameter.tensor.requires_grad();
    parameter.ready = !trained;
    parameter.arrived = false;
    parameter.with_graph.reset();
    if (trained && !buckets_.empty()) ++num_missing_[parameter.bucket];
  }
}

void Reducer::after_accumulation(size_t index) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!in_pass_) {
    has_local_ = true;
    return;
  }
  Parameter& parameter = parameters_[index];
  parameter.arrived = true;
  arrivals_.push_back(index);
  note(Event::Kind::kReady, index);
  if (buckets_.empty()) {
    if (!parameter.ready) order_.push_back(static_cast<int64_t>(index));
    parameter.ready = true;
    return;
  }
  TORCH_CHECK(parameter.bucket >= next_bucket_, "gradients: parameter '", parameter.name,
              "' got a second gradient in one backward when the first had already left; a parameter shared by parts "
              "that are checkpointed needs checkpoint(use_reentrant=False)");
  buckets_[parameter.bucket].note_writer();
  stow(parameter);
  if (parameter.ready) return;
  parameter.ready = true;
  --num_missing_[parameter.bucket];
  start_ready();
}

// What a bucket that does not pack needs beforehand: the gradient in its view. One copy after
// zero_grad(set_to_none=True), none otherwise.
void Reducer::stow(Parameter& parameter) {
  Bucket& bucket = buckets_[parameter.bucket];
  const at::Tensor& view = bucket.view(parameter.slot);
  const at::Tensor& own = gradient(parameter);
  if (own.defined() && is_same_memory(own, view)) return;
  at::NoGradGuard no_grad;
  if (own.defined()) check_fits(parameter, view);
  bucket.let_go(parameter.slot);
  if (bucket.packs()) return;
  if (!own.defined()) {
    view.zero_();
    return;
  }
  view.copy_(own);
  keep(parameter);
}

void Reducer::check_fits(Parameter& parameter, const at::Tensor& view) {
  const at::Tensor& own = gradient(parameter);
  TORCH_CHECK(own.layout() == at::kStrided && own.scalar_type() == view.scalar_type() && own.sizes() == view.sizes() &&
                  own.device() == view.device(),
              "gradients: the gradient of parameter '", parameter.name, "' must be dense ",
              c10::toString(view.scalar_type()), " ", view.sizes(), " on ", view.device(), ", but it is ", own.layout(),
              " ", c10::toString(own.scalar_type()), " ", own.sizes(), " on ", own.device(),
              "; sparse gradients and parameters changed after the reducer was made are not supported");
}

// The view that holds the gradient's numbers becomes the gradient, unless its graph goes on: an alias of it, since who
// casts a module or assigns to `grad.data` puts other memory under the very tensor.
void Reducer::keep(Parameter& parameter) {
  at::Tensor& own = gradient(parameter);
  const at::Tensor& view = buckets_[parameter.bucket].view(parameter.slot);
  if (!own.defined() || is_same_memory(own, view)) return;
  if (own.grad_fn()) {
    parameter.with_graph = own;
  } else {
    own = view.detach();
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
  Bucket& bucket = buckets_[index];
  const std::vector<size_t>& members = members_[index];
  std::vector<at::Tensor> gradients;
  std::vector<bool> arrived;
  for (const size_t member : members) {
    Parameter& parameter = parameters_[member];
    arrived.push_back(parameter.arrived);
    gradients.push_back(gradient(parameter));
    const at::Tensor& own = gradients.back();
    if (!failed && (!parameter.ready || !own.defined())) stow(parameter);
    if (failed && !(own.defined() && is_same_memory(own, bucket.view(parameter.slot)))) bucket.let_go(parameter.slot);
  }
  note(Event::Kind::kStart, index);
  bucket.measure(records_);
  next_bucket_ = index + 1;
  bucket.tell_kept(num_kept_);
  bucket.tell_hooks(hooks_raised_);
  bucket.start(collective_, gradients, arrived, failed);
  if (bucket.packs() && !failed) {
    for (const size_t member : members) keep(parameters_[member]);
  }
  statistics_.num_bytes += bucket.num_bytes();
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
  try {
    order_ = take_order(collective_, order_, parameters_.front().tensor.device());
  } catch (c10::Error& error) {
    if (!planned_anew_for_.empty()) {
      error.add_context("gradients: this rank plans its buckets anew, since parameter '" + planned_anew_for_ +
                        "' was frozen, thawed, cast or moved; what is done to one on some ranks must be done on all");
    }
    throw;
  }
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
    const auto side = side_stream(tensors.front().device());
    std::string label = "bucket " + std::to_string(index) + ": " + parameters_[members_[index].front()].name;
    if (members_[index].size() > 1) label += " ...";
    buckets.emplace_back(collective_, std::move(tensors), std::move(label), is_last ? collective_.size() : 0, options_,
                         side);
  }
  buckets_ = std::move(buckets);
  next_bucket_ = 0;
}

std::shared_ptr<const SideStream> Reducer::side_stream(const at::Device& device) {
  std::shared_ptr<const SideStream>& side = side_streams_[device.str()];
  if (!side) side = std::make_shared<SideStream>(device);
  return side;
}

void Reducer::end_of_backward(bool nested) {
  std::unique_lock<std::recursive_mutex> lock(mutex_);
  in_between_ = false;
  if (!in_pass_) return;
  if (nested) {
    TORCH_WARN_ONCE(
        "gradients: a backward inside a backward (checkpoint with use_reentrant=True) reduces all gradients each time; "
        "use checkpoint(use_reentrant=False), or have the reducer watch the model's output");
  }
  in_pass_ = false;
  finish_or_tell();
  const auto hooks = hooks_to_run();
  lock.unlock();  // they may call the reducer
  try {
    for (const auto& held : hooks) held->run();
  } catch (...) {
    lock.lock();
    hooks_raised_ = true;
    throw;
  }
}

void Reducer::finish_or_tell() {
  count_pass();
  try {
    finish();
    is_alike_ = true;
  } catch (...) {
    failed_ = true;
    release_hooks();
    tell_failure(true);
    throw;
  }
}

void Reducer::finish() {
  at::NoGradGuard no_grad;
  note(Event::Kind::kEndOfBackward, 0);
  if (records_) end_of_backward_ = now();
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
  if (records_) measure();
  const std::vector<int> failures = buckets_.back().failed_ranks();
  TORCH_CHECK(failures.empty(), "gradients: backward raised an exception on rank ", failures.front(),
              ", so the gradients of this backward are not those of the whole batch; zero them before the next one");
  hooks_raised_ = false;
  const std::vector<int> raised = buckets_.back().ranks_whose_hooks_raised();
  TORCH_CHECK(
      raised.empty() || static_cast<int>(raised.size()) == collective_.size(),
      "gradients: a hook of a parameter raised an exception on rank ", raised.front(),
      " in the backward before this one, and not on all ranks: if the others took a step that this one did not, "
      "parameters differ now; broadcast them, zero the gradients and go on");
  check_kept();
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
    own = view.detach();
  }
}

void Reducer::abandoned_backward() noexcept {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!in_pass_ && !in_between_) return;
  const bool has_begun = std::exchange(in_pass_, false);
  in_between_ = false;
  count_pass();
  failed_ = true;
  release_hooks();
  tell_failure(has_begun);
}

void Reducer::tell_failure(bool has_begun) noexcept {
  try {
    if (!has_begun) begin();
    if (buckets_.empty()) return;  // settle() will
    start_rest(true);
    // What is under way ends when the program may have zeroed its gradients: not in their memory.
    for (Bucket& bucket : buckets_) {
      for (size_t slot = 0; bucket.started() && slot < bucket.num_slots(); ++slot) bucket.let_go(slot);
    }
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

}  // namespace torchtp::gradients
