#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "backend/statistics.h"

namespace torchtp::backend {

// One call of a process group as one rank saw it. Times are of the host's common clock (core/clock.h); 0: not yet.
struct Operation {
  enum class State : uint8_t { kQueued, kRunning, kDone, kFailed };

  uint64_t sequence = 0;  // of collectives, the same on all ranks
  const char* op = "";
  const char* reduce_op = "";
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  State state = State::kQueued;
  bool asynchronous = false;
  int32_t root = -1;
  int64_t num_elements = 0;  // of the larger of what the rank reads and what it writes
  int64_t num_bytes = 0;
  int64_t called_ns = 0;
  int64_t started_ns = 0;  // its turn came
  int64_t ended_ns = 0;
  int64_t waited_ns = 0;  // for the last rank to come
  int32_t last_rank = -1;
};

// Keeps the last calls of one process group on one rank, and statistics of all of them. Thread-safe; some 100 ns a
// call.
class Recorder {
 public:
  static constexpr size_t kMostOperations = 2000;

  struct Identity {
    std::string group;
    int rank = 0;
    int size = 1;
    std::vector<uint64_t> global_ranks;  // by rank; empty: the same numbers
    uint64_t global_rank() const { return global_ranks.empty() ? rank : global_ranks.at(rank); }
  };

  explicit Recorder(Identity identity) : identity_(std::move(identity)), statistics_(identity_.size) {}

  const Identity& identity() const { return identity_; }

  // The call's number here, for the other two.
  uint64_t call(Operation operation);
  void start(uint64_t number);
  // `arrivals`: when each rank came to it, or empty. Returns whether it is the first that failed.
  bool end(uint64_t number, const std::string& error, const std::vector<int64_t>& arrivals);

  std::vector<Operation> operations() const;  // oldest first
  std::string error() const;                  // of the first that failed
  Statistics statistics() const;
  void reset_statistics();

 private:
  Operation* find(uint64_t number);  // nullptr when it has been overwritten

  const Identity identity_;
  mutable std::mutex mutex_;  // of the members below
  uint64_t next_ = 0;
  std::vector<Operation> ring_;  // number n at n % kMostOperations
  std::string error_;
  Statistics statistics_;
};

}  // namespace torchtp::backend
