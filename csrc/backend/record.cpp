#include "backend/record.h"

#include <algorithm>

namespace torchtp::backend {

uint64_t Recorder::call(Operation operation) {
  if (operation.called_ns == 0) operation.called_ns = now_ns();
  const auto kind = static_cast<size_t>(operation.kind);
  std::lock_guard<std::mutex> lock(mutex_);
  Ring& ring = rings_[kind];
  if (ring.operations.size() < kMostOperations) {
    ring.operations.push_back(operation);
  } else {
    ring.operations[ring.next % kMostOperations] = operation;
  }
  return ring.next++ * kNumKinds + kind;
}

Operation* Recorder::find(uint64_t number) {
  Ring& ring = rings_[number % kNumKinds];
  const uint64_t place = number / kNumKinds;
  return ring.next - place <= kMostOperations ? &ring.operations[place % kMostOperations] : nullptr;
}

Operation* Recorder::begin(uint64_t number) {
  Operation* const operation = find(number);
  if (operation != nullptr) {
    operation->started_ns = now_ns();
    operation->state = Operation::State::kRunning;
  }
  return operation;
}

void Recorder::start(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  begin(number);
}

uint64_t Recorder::start_collective(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t sequence = next_sequence_++;
  if (Operation* const operation = begin(number)) operation->sequence = sequence;
  return sequence;
}

bool Recorder::note_error(const std::string& error) {
  const bool first = !error.empty() && error_.empty();
  if (first) error_ = error;
  return first;
}

Operation* Recorder::close(uint64_t number, const std::string& error) {
  Operation* const operation = find(number);
  if (operation == nullptr) return nullptr;  // more than the ring holds were called meanwhile
  operation->ended_ns = now_ns();
  operation->state = error.empty() ? Operation::State::kDone : Operation::State::kFailed;
  if (error.empty()) return operation;
  statistics_.add_failed(operation->op, operation->num_bytes);
  return nullptr;
}

// What another rank says may be nonsense, or its clock another one, in a time namespace. Others may come up to a minute
// before this rank has made the group.
bool Recorder::can_be(const std::vector<int64_t>& arrivals, int64_t until_ns) const {
  constexpr int64_t kBeforehand = 60'000'000'000;
  const auto [first, last] = std::minmax_element(arrivals.begin(), arrivals.end());
  return *first >= made_ns_ - kBeforehand && *last <= until_ns;
}

bool Recorder::end(uint64_t number, const std::string& error, const std::vector<int64_t>& arrivals) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool first = note_error(error);
  Operation* const operation = close(number, error);
  if (operation == nullptr) return first;
  if (!arrivals.empty() && can_be(arrivals, operation->ended_ns)) {
    const auto last = std::max_element(arrivals.begin(), arrivals.end());
    operation->last_rank = static_cast<int32_t>(last - arrivals.begin());
    operation->waited_ns = *last - arrivals[identity_.rank];
    statistics_.add_arrivals(arrivals, operation->last_rank);
  }
  statistics_.add(operation->op, operation->num_bytes, operation->started_ns - operation->called_ns,
                  operation->ended_ns - operation->started_ns, operation->waited_ns);
  return first;
}

bool Recorder::end(uint64_t number, const std::string& error, const Meeting& meeting) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool first = note_error(error);
  Operation* const operation = close(number, error);
  if (operation == nullptr) return first;
  operation->number = meeting.number;
  if (operation->kind == Operation::Kind::kMessage) operation->peer = meeting.partner;
  if (meeting.waited_ns > 0) {
    operation->waited_ns = meeting.waited_ns;
    operation->last_rank = meeting.partner;
    statistics_.add_wait(identity_.rank, meeting.partner, meeting.waited_ns);
  }
  statistics_.add(operation->op, operation->num_bytes, 0, meeting.spent_ns, meeting.waited_ns);
  return first;
}

std::vector<Operation> Recorder::operations() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Operation> all;
  for (const Ring& ring : rings_) {
    const auto begin = ring.operations.begin(), end = ring.operations.end();
    const auto oldest =
        ring.next <= kMostOperations ? begin : begin + static_cast<int64_t>(ring.next % kMostOperations);
    all.insert(all.end(), oldest, end);
    all.insert(all.end(), begin, oldest);
  }
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
