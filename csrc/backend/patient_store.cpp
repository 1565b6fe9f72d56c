#include "backend/patient_store.h"

#include <system_error>
#include <utility>

#include "backend/signal_handlers.h"
#include "backend/work.h"
#include "core/format.h"

namespace torchtp::backend {

namespace {

constexpr char kTheStore[] = "the store that the ranks of a process group meet at ";

}  // namespace

PatientStore::PatientStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout)
    : state_(std::make_shared<State>()), timeout_(timeout) {
  state_->store = std::move(store);
  try {
    thread_ = std::thread([state = state_] { work(state); });
  } catch (const std::system_error&) {
    // Its limit is reached: then its caller asks, and waits for the answer as long as the store lets it.
  }
}

PatientStore::~PatientStore() {
  if (!thread_.joinable()) return;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool stuck = static_cast<bool>(state_->step);
  lock.unlock();
  if (stuck) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

int64_t PatientStore::add(const std::string& key, int64_t value) {
  const auto sum = std::make_shared<int64_t>();
  ask([=](c10d::Store& store) { *sum = store.add(key, value); });
  return *sum;
}

void PatientStore::set(const std::string& key, const std::string& value) {
  ask([=](c10d::Store& store) { store.set(key, std::vector<uint8_t>(value.begin(), value.end())); });
}

std::string PatientStore::get(const std::string& key) {
  const auto found = std::make_shared<std::vector<uint8_t>>();
  ask([=](c10d::Store& store) { *found = store.get(key); });
  return {found->begin(), found->end()};
}

std::vector<std::string> PatientStore::get_all(const std::vector<std::string>& keys) {
  const auto found = std::make_shared<std::vector<std::string>>();
  ask([=](c10d::Store& store) {
    for (const std::vector<uint8_t>& value : store.multiGet(keys)) found->emplace_back(value.begin(), value.end());
  });
  return *found;
}

bool PatientStore::has_all(const std::vector<std::string>& keys) {
  const auto found = std::make_shared<bool>();
  ask([=](c10d::Store& store) { *found = store.check(keys); });
  return *found;
}

void PatientStore::ask(Step step) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  const auto is_done = [&] { return !state_->step; };
  if (is_done()) {
    state_->error.clear();
    state_->step = std::move(step);
    state_->changed.notify_all();
    if (!thread_.joinable()) take_step(*state_, lock);
    if (wait_looking(state_->changed, lock, timeout_, is_done, run_signal_handlers)) {
      if (!state_->error.empty())
        throw StoreError(cat(kTheStore, "failed: ", state_->error, " (rank 0 or torchrun serves it)"));
      return;
    }
  }
  throw StoreError(cat(kTheStore, "has not answered for ", in_words(timeout_),
                       ": is the process that serves it (rank 0, or torchrun) stopped or out of reach?"));
}

void PatientStore::work(const std::shared_ptr<State>& state) {
  std::unique_lock<std::mutex> lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->stopping || state->step; });
    if (!state->step) return;
    take_step(*state, lock);
  }
}

void PatientStore::take_step(State& state, std::unique_lock<std::mutex>& lock) {
  const Step step = state.step;
  lock.unlock();
  std::string error;
  try {
    step(*state.store);
  } catch (...) {
    error = message_of(std::current_exception());
    if (error.empty()) error = "it raised an error without words";
  }
  lock.lock();
  state.error = error;
  state.step = nullptr;
  state.changed.notify_all();
}

}  // namespace torchtp::backend
