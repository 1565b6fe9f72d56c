#include "backend/lifetime.h"

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <utility>

#include "backend/gil.h"
#include "backend/signal_handlers.h"
#include "backend/work.h"
#include "core/format.h"

namespace torchtp::backend {

Lifetime::Lifetime(std::shared_ptr<Engine> engine, std::shared_ptr<DeviceGroup> device)
    : engine_(std::move(engine)), device_(std::move(device)) {}

Lifetime::~Lifetime() {
  try {
    end();
  } catch (...) {  // interrupted: it has ended all the same
  }
}

void Lifetime::check() const {
  TORCH_CHECK_WITH(DistBackendError, !over_, "torchtp: the process group has been shut down");
}

std::unique_ptr<shm::OutsideWait> Lifetime::wait_outside(int rank, const std::string& what) const {
  if (over_) return nullptr;
  const std::shared_ptr<shm::Group>& host = engine_->host();
  for (int here = 0; here < host->size(); ++here) {
    if (host->called(here) == rank) return std::make_unique<shm::OutsideWait>(host, here, what);
  }
  return nullptr;
}

void Lifetime::submit(std::function<void()> task) {
  try {
    if (!runner_.submit(std::move(task))) check();
  } catch (const std::system_error& error) {
    lack_thread(error);
  }
}

void Lifetime::lack_thread(const std::system_error& error) {
  const std::string why =
      cat("rank ", engine_->rank(), " cannot start a thread for what it does not wait for: ", error.code().message(),
          " (is the limit of processes reached, ulimit -u or the cgroup's pids.max?)");
  engine_->abort(why);
  try {
    engine_->check();
  } catch (...) {
    std::rethrow_exception(as_dist_error(std::current_exception()));
  }
  TORCH_CHECK_WITH(DistBackendError, false, "torchtp: ", why);
}

void Lifetime::run(uint64_t sequence, const std::function<void()>& task) {
  run_after([&] { return cat("the queue before call #", sequence); }, task);
}

// `where` this rank waits until it is the task's turn.
void Lifetime::run_after(const std::function<std::string()>& where, const std::function<void()>& task) {
  std::optional<shm::FirstThreadWaits> wait;
  runner_.run(task, [&] {
    if (!wait) wait.emplace(engine_->host());
    engine_->handle_signals(where);
  });
}

void Lifetime::end(const std::string& error, std::chrono::milliseconds patience) {
  std::exception_ptr interruption;
  if (finish(error, patience, interruption)) {
    const GilRelease release;
    leave(error);
  }
  if (interruption) std::rethrow_exception(interruption);
}

bool Lifetime::finish(const std::string& error, std::chrono::milliseconds patience, std::exception_ptr& interruption) {
  if (in_signal_handler()) {  // of a wait in this group, maybe: it ends by this, and the group when it can
    engine_->abort(cat("rank ", engine_->rank(), " shut the group down in a signal handler"));
    return false;
  }
  if (engine_->host()->is_forked()) {
    runner_.leave_as_it_is();
    return false;
  }
  const GilRelease release;
  if (over_.exchange(true)) return false;
  if (!error.empty() && !Runner::on_worker() && !runner_.is_idle_within(patience)) {
    engine_->abort(cat("rank ", engine_->rank(), " ended by an error (", error, ") with calls under way"));
  }
  try {
    if (!Runner::on_worker()) run_after([] { return "the end of the group"; }, [] {});
  } catch (...) {
    interruption = std::current_exception();
  }
  runner_.stop();
  device_->close();
  return true;
}

}  // namespace torchtp::backend
