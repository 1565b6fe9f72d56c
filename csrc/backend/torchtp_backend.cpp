#include "backend/torchtp_backend.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "backend/arguments.h"
#include "backend/comms_event.h"
#include "backend/dense.h"
#include "backend/device_work.h"
#include "backend/handled_exception.h"
#include "backend/label.h"
#include "backend/recorded_exchange.h"
#include "backend/signal_handlers.h"
#include "backend/work.h"
#include "collectives/call.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/format.h"

namespace torchtp::backend {
namespace {

// For what is queued where a group is destroyed on the way out with an exception. Others may have sent their parts.
constexpr auto kPatienceOfErrors = std::chrono::seconds(1);

void check(const Engine& engine) {
  try {
    engine.check();
  } catch (...) {
    std::rethrow_exception(as_dist_error(std::current_exception()));
  }
}

// Before any lock: one that another thread held when this process was forked is held here for ever, and one that this
// thread holds stays held as long as its signal handler runs.
void check_caller(const Engine& engine) {
  TORCH_CHECK_WITH(DistBackendError, !engine.host()->is_forked(),
                   "torchtp: this process was forked from a rank of the process group and is not that rank; make a "
                   "process group of its own, or have the parent make the call");
  refuse_in_signal_handler("the process group");
  engine.host()->note_caller();
}

// With the ranks of a group whose global ranks are known.
Acquaintance acquaintance(const std::shared_ptr<Lifetime>& default_group, const std::string& name,
                          const std::vector<uint64_t>& global_ranks) {
  if (!default_group || global_ranks.empty()) return {};
  const std::string what = cat("new_group '", name, "' (", global_ranks.size(), " ranks)");
  const auto global = [=](int rank) { return static_cast<int>(global_ranks.at(rank)); };
  return {[=](int rank) { return default_group->presence(global(rank)); },
          [=](int rank) { return default_group->wait_outside(global(rank), what); }};
}

// `posting_ns`: what the call itself took.
void end_message(Recorder& recorder, const Trace* trace, uint64_t number, const MessageEnd& end, int64_t posting_ns) {
  Meeting meeting;
  meeting.spent_ns = posting_ns;
  meeting.partner = end.peer;
  meeting.number = end.number;
  if (end.waited_from_ns != 0) {
    const int64_t now = now_ns();
    meeting.spent_ns += now - end.waited_from_ns;
    if (end.came_ns != 0) meeting.waited_ns = std::clamp(end.came_ns, end.waited_from_ns, now) - end.waited_from_ns;
  }
  const std::string why = end.error ? message_of(end.error) : "";
  if (recorder.end(number, why, meeting) && trace != nullptr) trace->dump("error: " + why);
}

}  // namespace

TorchtpBackend::TorchtpBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                               c10::intrusive_ptr<Options> options, DeviceGroup::Make make_device_group,
                               MakeGroup make_group, OfProcess of_process)
    : Backend(rank, size),
      options_(std::move(options)),
      make_group_(std::move(make_group)),
      made_(
          make_engine(store, rank, size,
                      {options_->timeout, options_->group_name, options_->global_ranks_in_group,
                       of_process.trace ? of_process.trace->whereabouts() : nullptr, std::move(of_process.fork_guard),
                       acquaintance(of_process.default_group, options_->group_name, options_->global_ranks_in_group)})),
      engine_(made_.engine),
      device_(std::make_shared<DeviceGroup>(std::move(make_device_group), made_.store_prefix + "/device")),
      recorder_(std::make_shared<Recorder>(
          Recorder::Identity{options_->group_name, rank, size, options_->global_ranks_in_group})),
      trace_(std::move(of_process.trace)),
      lifetime_(std::make_shared<Lifetime>(engine_, device_)) {
  if (trace_) trace_->add(recorder_);
}

TorchtpBackend::~TorchtpBackend() = default;

std::shared_ptr<exchange::Exchange> TorchtpBackend::exchange() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!exchange_) {
    exchange_ = std::make_shared<RecordedExchange>(engine_->make_exchange(), recorder_, trace_, getGroupDesc());
  }
  return exchange_;
}

void TorchtpBackend::set_inner_device(c10::DeviceType type) {
  device_->set_device(type);
  device_->get();
}

uint64_t TorchtpBackend::getSequenceNumberForGroup() {
  std::lock_guard<std::mutex> lock(mutex_);
  return sequence_;
}

void TorchtpBackend::startCoalescing() {
  std::lock_guard<std::mutex> lock(mutex_);
  coalescing_ = true;
  coalesced_.clear();
}

TorchtpBackend::WorkPtr TorchtpBackend::endCoalescing() {
  std::vector<WorkPtr> works;
  bool inner_coalescing;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    coalescing_ = false;
    inner_coalescing = std::exchange(inner_coalescing_, false);
    works = std::exchange(coalesced_, {});
  }
  const auto inner = inner_coalescing ? device_->made() : nullptr;
  if (inner) {
    if (auto work = inner->endCoalescing()) works.push_back(std::move(work));
  }
  return c10::make_intrusive<WorkList>(getRank(), std::move(works));
}

TorchtpBackend::WorkPtr TorchtpBackend::remember(WorkPtr work) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

c10d::ErrorType TorchtpBackend::getError() {
  return engine_->aborted() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void TorchtpBackend::abort() {
  engine_->abort("rank " + std::to_string(getRank()) + " called abort()");
  device_->abort();
}

void TorchtpBackend::shutdown() { lifetime_->end(handled_exception(), kPatienceOfErrors); }

std::function<void()> TorchtpBackend::task(uint64_t number, std::chrono::milliseconds timeout,
                                           std::function<void(const Call&)> body,
                                           std::function<void(std::exception_ptr)> complete) const {
  return [engine = engine_, recorder = recorder_, trace = trace_, number, timeout, label = CallLabel::current(),
          body = std::move(body), complete = std::move(complete)] {
    std::exception_ptr error;
    const uint64_t sequence = recorder->start_collective(number);
    try {
      const at::NoGradGuard no_grad;
      engine->set_call_timeout(timeout);
      engine->host()->set_label(label);
      body({*engine, sequence});
    } catch (const Error&) {
      error = as_dist_error(std::current_exception());
    } catch (...) {
      // Of this rank alone, as when its memory is full: the others wait for it, maybe half way through.
      error = std::current_exception();
      engine->abort(cat("rank ", engine->rank(), " failed in call #", sequence, ": ", message_of(error)));
    }
    const std::string why = error ? message_of(error) : "";
    if (recorder->end(number, why, engine->arrivals()) && trace) trace->dump("error: " + why);
    complete(error);
  };
}

uint64_t TorchtpBackend::record(const Plan& plan, uint64_t sequence, bool asynchronous) const {
  const Volume in(plan.inputs), out(plan.outputs);
  const Volume& larger = in.num_bytes > out.num_bytes ? in : out;
  Operation operation;
  operation.sequence = sequence;
  operation.op = name_of(plan.op);
  operation.reduce_op = collectives::reduce_op_of(plan.print);
  operation.dtype = larger.dtype;
  operation.asynchronous = asynchronous;
  operation.root = plan.print.root;
  operation.num_elements = larger.num_elements;
  operation.num_bytes = larger.num_bytes;
  return recorder_->call(operation);
}

DeviceGroup::BackendPtr TorchtpBackend::inner_for(const Plan& plan) const {
  std::optional<at::Device> device = plan.device;
  for (const Tensors* list : {&plan.inputs, &plan.outputs}) {
    for (const at::Tensor& tensor : *list) {
      if (!device) device = tensor.device();
      TORCH_CHECK(tensor.device() == *device, plan.title, ": all tensors of a call must lie on one device, got ",
                  *device, " and ", tensor.device());
    }
  }
  return device ? inner_for(*device) : nullptr;
}

DeviceGroup::BackendPtr TorchtpBackend::inner_for(const at::Device& device) const {
  if (device_->takes(device)) return device_->get();
  TORCH_CHECK(device.is_cpu(), "torchtp: this process group does not carry tensors on ", device);
  return nullptr;
}

TorchtpBackend::WorkPtr TorchtpBackend::launch(bool asynchronous, std::chrono::milliseconds timeout,
                                               const std::function<Plan()>& make,
                                               const std::function<WorkPtr(Inner&)>& inner) {
  check_caller(*engine_);
  Plan plan;
  DeviceGroup::BackendPtr inner_backend;
  std::exception_ptr refusal;
  try {
    plan = make();
    // Of a broadcast or a reduce also where it is only read: what the writers could not is an error on all.
    for (const at::Tensor& output : plan.outputs) check_writable(output, std::strchr(plan.title, ':') + 1);
    inner_backend = inner_for(plan);
  } catch (...) {
    refusal = std::current_exception();
  }
  c10::intrusive_ptr<TorchtpWork> work;
  std::function<void()> run;
  std::optional<CommsEvent> event;
  uint64_t sequence;
  {
    // Under the mutex: the order of sequence numbers is the order of the queue, unless callbacks call something.
    std::unique_lock<std::mutex> lock(mutex_);
    lifetime_->check();
    sequence = sequence_++;
    if (timeout < std::chrono::milliseconds::zero()) timeout = options_->timeout;
    if (refusal) {
      const auto refuse = [](const Call& call) {
        call.engine.agree(collectives::fingerprint(call.sequence, collectives::Kind::kRefused, 0, at::kByte));
      };
      Operation refused;
      refused.sequence = sequence;
      refused.op = "refused";
      lifetime_->submit(task(recorder_->call(refused), timeout, refuse, [](std::exception_ptr) {}));
      std::rethrow_exception(refusal);
    }
    event.emplace(recorder_->identity(), getGroupDesc(),
                  CommsCall{plan.op, sequence, asynchronous, plan.inputs, plan.outputs});
    const uint64_t number = record(plan, sequence, asynchronous);
    if (inner_backend) {
      plan.print.flags |= collectives::kOnDevice;
      announce(lock, sequence, plan.print, number, timeout);
    } else {
      work = c10::make_intrusive<TorchtpWork>(getRank(), plan.op, plan.title, sequence, std::move(plan.outputs),
                                              plan.inputs);
      work->belongs_to(engine_, lifetime_->places());
      run = task(number, timeout, std::move(plan.body), [work](std::exception_ptr error) { work->complete(error); });
      if (asynchronous) {
        lifetime_->submit(std::move(run));
        if (coalescing_) coalesced_.push_back(work);
        return work;
      }
    }
  }
  if (inner_backend) return on_device(*inner_backend, plan.op, sequence, asynchronous, inner);
  lifetime_->run(sequence, run);
  return work;
}

// Beside the inner backend's work, so that it costs the device nothing. The first time beforehand: an inner backend
// that connects its ranks in their first call would wait for a rank that calls something else.
void TorchtpBackend::announce(std::unique_lock<std::mutex>& lock, uint64_t sequence, const shm::Fingerprint& print,
                              uint64_t number, std::chrono::milliseconds timeout) {
  const auto failed = std::make_shared<std::exception_ptr>();
  auto agree = task(
      number, timeout,
      [print = print](const Call& call) mutable {
        print.sequence = call.sequence;
        call.engine.agree(print);
      },
      [device = device_, failed](std::exception_ptr error) {
        *failed = error;
        if (error) device->abort();
      });
  if (std::exchange(announced_, true)) return lifetime_->submit(std::move(agree));
  lock.unlock();
  lifetime_->run(sequence, agree);
  if (*failed) std::rethrow_exception(*failed);
}

TorchtpBackend::WorkPtr TorchtpBackend::on_device(Inner& backend, c10d::OpType op, uint64_t sequence, bool asynchronous,
                                                  const std::function<WorkPtr(Inner&)>& inner) {
  check(*engine_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (coalescing_ && !inner_coalescing_ && backend.supportsCoalescing()) {
      backend.startCoalescing();
      inner_coalescing_ = true;
    }
  }
  WorkPtr work;
  try {
    work = inner(backend);
  } catch (...) {
    check(*engine_);
    throw;
  }
  if (!work) return work;  // part of what the inner backend coalesces, or done on the current stream
  work = c10::make_intrusive<DeviceWork>(work, getRank(), op, sequence, [engine = engine_] { check(*engine); });
  if (!asynchronous && device_->stands_in() && work->wait()) return nullptr;  // as NCCL does
  std::lock_guard<std::mutex> lock(mutex_);
  if (coalescing_ && !inner_coalescing_) coalesced_.push_back(work);
  return work;
}

bool TorchtpBackend::is_announced() {
  std::lock_guard<std::mutex> lock(mutex_);
  return announced_;
}

void TorchtpBackend::check_root(int64_t root, const char* what) const {
  TORCH_CHECK(root >= 0 && root < getSize(), "torchtp ", what, ": root must be a rank of the group (0 to ",
              getSize() - 1, "), got ", root);
}

void TorchtpBackend::check_open() {
  check_caller(*engine_);
  lifetime_->check();
}

TorchtpBackend::WorkPtr TorchtpBackend::message(c10d::OpType op, const at::Tensor& tensor, const MessageTo& to,
                                                const std::function<Engine::MessagePtr(Engine&)>& on_cpu,
                                                const std::function<WorkPtr(Inner&)>& inner) {
  check_open();
  if (const auto backend = inner_for(tensor.device())) return on_device(*backend, op, 0, true, inner);
  Operation operation;
  operation.kind = Operation::Kind::kMessage;
  operation.op = name_of(op);
  operation.state = Operation::State::kRunning;
  operation.asynchronous = true;
  const Volume volume({tensor});
  operation.dtype = volume.dtype;
  operation.num_elements = volume.num_elements;
  operation.num_bytes = volume.num_bytes;
  operation.peer = to.peer;
  operation.tag = to.tag;
  operation.called_ns = operation.started_ns = now_ns();
  Engine::MessagePtr work;
  try {
    work = on_cpu(*engine_);
  } catch (const c10::DistBackendError& error) {  // another error is a mistake in arguments: nothing has been called
    end_message(*recorder_, trace_.get(), recorder_->call(operation), {std::current_exception()}, 0);
    throw;
  } catch (const std::system_error& error) {
    lifetime_->lack_thread(error);
  }
  work->belongs_to(engine_);
  const int64_t spent_ns = now_ns() - operation.called_ns;
  work->observe([recorder = recorder_, trace = trace_, number = recorder_->call(operation),
                 spent_ns](const MessageEnd& end) { end_message(*recorder, trace.get(), number, end, spent_ns); });
  return remember(work);
}

TorchtpBackend::WorkPtr TorchtpBackend::send(Tensors& tensors, int peer, int tag) {
  const CommsEvent event(recorder_->identity(), getGroupDesc(), {c10d::OpType::SEND, 0, true, tensors, {}});
  const at::Tensor& tensor = only(tensors, "send");
  return message(
      c10d::OpType::SEND, tensor, {peer, tag}, [&](Engine& engine) { return engine.send(tensor, peer, tag); },
      [&](Inner& inner) { return inner.send(tensors, peer, tag); });
}

TorchtpBackend::WorkPtr TorchtpBackend::recv(Tensors& tensors, int peer, int tag) {
  const CommsEvent event(recorder_->identity(), getGroupDesc(), {c10d::OpType::RECV, 0, true, {}, tensors});
  const at::Tensor& tensor = only(tensors, "recv");
  return message(
      c10d::OpType::RECV, tensor, {peer, tag}, [&](Engine& engine) { return engine.recv(tensor, peer, tag); },
      [&](Inner& inner) { return inner.recv(tensors, peer, tag); });
}

TorchtpBackend::WorkPtr TorchtpBackend::recvAnysource(Tensors& tensors, int tag) {
  const CommsEvent event(recorder_->identity(), getGroupDesc(), {c10d::OpType::RECVANYSOURCE, 0, true, {}, tensors});
  const at::Tensor& tensor = only(tensors, "recv");
  return message(
      c10d::OpType::RECVANYSOURCE, tensor, {-1, tag}, [&](Engine& engine) { return engine.recv_any(tensor, tag); },
      [&](Inner& inner) { return inner.recvAnysource(tensors, tag); });
}

}  // namespace torchtp::backend
