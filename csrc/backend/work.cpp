#include "backend/work.h"

#include <ATen/core/jit_type.h>

#include <optional>
#include <utility>

#include "backend/comms_event.h"
#include "backend/engine.h"
#include "backend/gil.h"
#include "backend/signal_handlers.h"
#include "core/error.h"
#include "core/format.h"
#include "core/process.h"

namespace torchtp::backend {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> make_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

void settle(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs, const std::exception_ptr& error) {
  if (error) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(outputs));
  }
}

}  // namespace

TorchtpWork::TorchtpWork(int rank, c10d::OpType op, const char* title, uint64_t sequence,
                         std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs)
    : Work(rank, op, title, inputs), sequence_(sequence), outputs_(std::move(outputs)) {}

void TorchtpWork::complete(std::exception_ptr error) {
  finish(error);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    done_ = true;
    error_ = error;
    future = future_;
  }
  if (future) places_.run_at(place_, [future, outputs = outputs_, error] { settle(*future, outputs, error); });
}

// A callback that asks for this work runs on the thread that would have to do it (PowerSGD's hook waits like that).
void TorchtpWork::catch_up() {
  if (!Runner::on_worker()) return;
  GilRelease release;
  places_.catch_up([this] { return Work::isCompleted(); });
}

bool TorchtpWork::wait(std::chrono::milliseconds timeout) {
  catch_up();
  return wait_for_others(timeout, timeout == kNoTimeout);  // who waits for a while only goes on elsewhere then
}

bool TorchtpWork::wait_for_others(std::chrono::milliseconds timeout, bool for_rounds) {
  const auto engine = engine_.lock();
  if (!engine || !on_main_thread()) return Work::wait(timeout);
  const auto where = [&] { return cat(name_of(retrieveOpType()), " #", sequence_); };
  std::optional<shm::FirstThreadWaits> wait;
  const auto look = [&] {
    refuse_in_signal_handler("wait()");
    if (for_rounds && !wait) wait.emplace(engine->host());
    engine->handle_signals(where);
  };
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_done = [&] { return completed_; };
  const bool done = wait_looking(cv_, lock, timeout == kNoTimeout ? kForever : timeout, is_done, look);
  lock.unlock();
  return Work::wait(done ? kNoTimeout : std::chrono::milliseconds(1));  // which tells of the timeout
}

c10::intrusive_ptr<c10::ivalue::Future> TorchtpWork::getFuture() {
  catch_up();
  std::lock_guard<std::mutex> lock(future_mutex_);
  if (!future_) {
    future_ = make_future();
    place_ = places_.hold();
    if (done_) settle(*future_, outputs_, error_);
  }
  return future_;
}

WorkList::WorkList(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool WorkList::isCompleted() {
  for (const auto& work : works_) {
    if (!work->isCompleted()) return false;
  }
  return true;
}

bool WorkList::isSuccess() const {
  for (const auto& work : works_) {
    if (!work->isSuccess()) return false;
  }
  return true;
}

std::exception_ptr WorkList::exception() const {
  for (const auto& work : works_) {
    if (const auto error = work->exception()) return error;
  }
  return nullptr;
}

bool WorkList::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) {
    if (!work->wait(timeout)) return false;
  }
  return true;
}

std::vector<at::Tensor> WorkList::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkList::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures)->then(
      [works = works_](c10::ivalue::Future& all) {
        if (all.hasError()) std::rethrow_exception(all.exception_ptr());
        std::vector<at::Tensor> tensors;
        for (const auto& work : works) {
          for (at::Tensor& tensor : work->result()) tensors.push_back(std::move(tensor));
        }
        return c10::IValue(tensors);
      },
      c10::ListType::create(c10::TensorType::get()));
}

std::exception_ptr as_dist_error(std::exception_ptr error) {
  if (!error) return error;
  try {
    std::rethrow_exception(error);
  } catch (const Error& own) {
    try {
      const std::string what = own.what();
      TORCH_CHECK_WITH(DistBackendError, false, what.rfind("torchtp", 0) == 0 ? "" : "torchtp: ", what);
    } catch (...) {
      return std::current_exception();
    }
  } catch (...) {
    return std::current_exception();
  }
  return error;
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an unknown error";
  }
}

}  // namespace torchtp::backend
