#include "backend/record.h"

#include <algorithm>

#include "core/clock.h"

namespace torchtp::backend {

uint64_t Recorder::call(Operation operation) {
  operation.called_ns = now_ns();
  std::lock_guard<std::mutex> lock(mutex_);
  if (ring_.size() < kMostOperations) {
    ring_.push_back(operation);
  } else {
    ring_[next_ % kMostOperations] = operation;
  }
  return next_++;
}

Operation* Recorder::find(uint64_t number) {
  return next_ - number <= kMostOperations ? &ring_[number % kMostOperations] : nullptr;
}

void Recorder::start(uint64_t number) {
  const int64_t now = now_ns();
  std::lock_guard<std::mutex> lock(mutex_);
  if (Operation* const operation = find(number)) {
    operation->started_ns = now;
    operation->state = Operation::State::kRunning;
  }
}

bool Recorder::end(uint64_t number, const std::string& error, const std::vector<int64_t>& arrivals) {
  const int64_t now = now_ns();
  std::lock_guard<std::mutex> lock(mutex_);
  const bool first = !error.empty() && error_.empty();
  if (first) error_ = error;
  Operation* const operation = find(number);
  if (operation == nullptr) return first;  // more than the ring holds were called meanwhile
  operation->ended_ns = now;
  if (!error.empty()) {
    operation->state = Operation::State::kFailed;
    statistics_.add_failed(operation->op, operation->num_bytes);
    return first;
  }
  operation->state = Operation::State::kDone;
  if (!arrivals.empty()) {
    const auto last = std::max_element(arrivals.begin(), arrivals.end());
    operation->last_rank = static_cast<int32_t>(last - arrivals.begin());
    operation->waited_ns = *last - arrivals[identity_.rank];
    statistics_.add_arrivals(arrivals, operation->last_rank);
  }
  statistics_.add(operation->op, operation->num_bytes, operation->started_ns - operation->called_ns,
                  now - operation->started_ns, operation->waited_ns);
  return first;
}

std::vector<Operation> Recorder::operations() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (next_ <= kMostOperations) return ring_;
  const auto oldest = ring_.begin() + static_cast<int64_t>(next_ % kMostOperations);
  std::vector<Operation> all(oldest, ring_.end());
  all.insert(all.end(), ring_.begin(), oldest);
  return all;
}

std::string Recorder::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

Statistics Recorder::statistics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return statistics_;
}

void Recorder::reset_statistics() {
  std::lock_guard<std::mutex> lock(mutex_);
  statistics_ = Statistics(identity_.size);
}

}  // namespace torchtp::backend
