#include "backend/torchtp_backend.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <utility>

#include "backend/arguments.h"
#include "backend/gil.h"
#include "backend/point_to_point.h"
#include "backend/store_bootstrap.h"
#include "backend/work.h"
#include "core/error.h"
#include "exchange/shm_exchange.h"
#include "shm/host.h"

namespace torchtp::backend {
namespace {

void check_one_host(shm::Bootstrap& bootstrap) {
  const std::vector<std::string> hosts = bootstrap.all_gather(shm::host_identity());
  for (size_t r = 1; r < hosts.size(); ++r) {
    if (hosts[r] == hosts[0]) continue;
    throw Error("all ranks of a torchtp group must run on one host, but rank 0 is on " + hosts[0] + " and rank " +
                std::to_string(r) + " on " + hosts[r] + "; make groups of the ranks of one host, or use gloo");
  }
}

std::shared_ptr<shm::Group> make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       const TorchtpBackend::Options& options) {
  try {
    StoreBootstrap bootstrap(store, rank, size, options.timeout);
    check_one_host(bootstrap);
    shm::GroupOptions group_options;
    group_options.timeout = options.timeout;
    group_options.name = options.group_name;
    group_options.describe = collectives::describe;
    return shm::Group::create(bootstrap, group_options);
  } catch (...) {
    std::rethrow_exception(as_dist_error(std::current_exception()));
  }
}

}  // namespace

TorchtpBackend::TorchtpBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                               c10::intrusive_ptr<Options> options)
    : Backend(rank, size), options_(std::move(options)), group_(make_group(store, rank, size, *options_)) {}

TorchtpBackend::~TorchtpBackend() { shutdown(); }

std::shared_ptr<exchange::Exchange> TorchtpBackend::exchange() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!exchange_) exchange_ = std::make_shared<exchange::ShmExchange>(group_);
  return exchange_;
}

void TorchtpBackend::setTimeout(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  options_->timeout = timeout;
  group_->set_timeout(timeout);
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
  std::lock_guard<std::mutex> lock(mutex_);
  coalescing_ = false;
  return c10::make_intrusive<WorkList>(getRank(), std::exchange(coalesced_, {}));
}

TorchtpBackend::WorkPtr TorchtpBackend::remember(WorkPtr work) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

c10d::ErrorType TorchtpBackend::getError() {
  return group_->aborted() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

at::Tensor TorchtpBackend::allocateTensor(long size, at::TensorOptions options) {
  const size_t num_bytes = size * options.dtype().itemsize();
  if (!options.device().is_cpu() || num_bytes == 0) return at::empty({size}, options);
  try {
    std::byte* memory = group_->allocate(num_bytes);
    return at::from_blob(
        memory, {size}, [group = group_](void* pointer) { group->free(static_cast<std::byte*>(pointer)); }, options);
  } catch (const Error& error) {
    TORCH_WARN_ONCE("torchtp gives ordinary memory instead of shared memory, which costs a copy in collectives: ",
                    error.what());
    return at::empty({size}, options);
  }
}

void TorchtpBackend::abort() { group_->abort("rank " + std::to_string(getRank()) + " called abort()"); }

void TorchtpBackend::shutdown() {
  GilRelease release;
  std::unique_ptr<PointToPoint> point_to_point;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    point_to_point = std::move(point_to_point_);
  }
  runner_.stop();
  if (point_to_point) point_to_point->stop();
  group_->leave();
}

std::function<void()> TorchtpBackend::task(uint64_t sequence, std::chrono::milliseconds timeout,
                                           std::function<void(const collectives::Call&)> body,
                                           std::function<void(std::exception_ptr)> complete) const {
  return [group = group_, sequence, timeout, body = std::move(body), complete = std::move(complete)] {
    std::exception_ptr error;
    try {
      const at::NoGradGuard no_grad;
      group->set_timeout(timeout);
      body({*group, sequence});
    } catch (...) {
      error = as_dist_error(std::current_exception());
    }
    complete(error);
  };
}

TorchtpBackend::WorkPtr TorchtpBackend::launch(bool asynchronous, std::chrono::milliseconds timeout,
                                               const std::function<Plan()>& make) {
  Plan plan;
  std::exception_ptr refusal;
  try {
    plan = make();
  } catch (...) {
    refusal = std::current_exception();
  }
  c10::intrusive_ptr<TorchtpWork> work;
  std::function<void()> run;
  {
    // Under the mutex: the order of sequence numbers is the order of the queue.
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, !closed_, "torchtp: the process group has been shut down");
    const uint64_t sequence = sequence_++;
    if (timeout < std::chrono::milliseconds::zero()) timeout = options_->timeout;
    if (refusal) {
      const auto refuse = [](const collectives::Call& call) {
        call.group.round(call.fingerprint(collectives::Kind::kRefused, 0, at::kByte));
      };
      runner_.submit(task(sequence, timeout, refuse, [](std::exception_ptr) {}));
      std::rethrow_exception(refusal);
    }
    work = c10::make_intrusive<TorchtpWork>(getRank(), plan.op, plan.title, sequence, std::move(plan.outputs),
                                            plan.inputs);
    run = task(sequence, timeout, std::move(plan.body), [work](std::exception_ptr error) { work->complete(error); });
    if (asynchronous) {
      runner_.submit(std::move(run));
      if (coalescing_) coalesced_.push_back(work);
      return work;
    }
  }
  runner_.run(run);
  return work;
}

void TorchtpBackend::check_root(int64_t root, const char* what) const {
  TORCH_CHECK(root >= 0 && root < getSize(), "torchtp ", what, ": root must be a rank of the group (0 to ",
              getSize() - 1, "), got ", root);
}

PointToPoint& TorchtpBackend::point_to_point() {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, "torchtp: the process group has been shut down");
  if (!point_to_point_) point_to_point_ = std::make_unique<PointToPoint>(group_);
  return *point_to_point_;
}

TorchtpBackend::WorkPtr TorchtpBackend::send(Tensors& tensors, int peer, int tag) {
  return remember(point_to_point().send(only(tensors, "send"), peer, tag));
}

TorchtpBackend::WorkPtr TorchtpBackend::recv(Tensors& tensors, int peer, int tag) {
  return remember(point_to_point().recv(only(tensors, "recv"), peer, tag));
}

TorchtpBackend::WorkPtr TorchtpBackend::recvAnysource(Tensors& tensors, int tag) {
  return remember(point_to_point().recv_any(only(tensors, "recv"), tag));
}

}  // namespace torchtp::backend
