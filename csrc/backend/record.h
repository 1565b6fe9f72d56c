#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "backend/statistics.h"
#include "core/clock.h"

namespace torchtp::backend {

// One call of a process group as one rank saw it. Times are of the host's common clock (core/clock.h); 0: not yet.
struct Operation {
  enum class Kind : uint8_t { kCollective, kMessage, kHalo };
  enum class State : uint8_t { kQueued, kRunning, kDone, kFailed };

  Kind kind = Kind::kCollective;
  uint64_t sequence = 0;  // of collectives, and of halos, each counted alone: the same on all ranks
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
  int32_t peer = -1;  // of a message; -1: any
  int32_t tag = 0;
  int64_t number = -1;  // of a message from its sender to its receiver; -1: not yet, or not known
};

// How a message or an exchange of halos went.
struct Meeting {
  int64_t spent_ns = 0;   // in calls of the program
  int64_t waited_ns = 0;  // of these, for the partner
  int partner = -1;
  int64_t number = -1;
};

// Keeps the last calls of each kind of one process group on one rank, and statistics of all of them. Thread-safe; some
// 100 ns a call.
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

  // The call's number here, for the others. It is called now, unless the operation says when.
  uint64_t call(Operation operation);
  void start(uint64_t number);
  // The same for a collective: its sequence number, which is known now, as callbacks may have called something before.
  uint64_t start_collective(uint64_t number);
  // `arrivals`: when each rank came to it, or empty. Returns whether it is the first that failed.
  bool end(uint64_t number, const std::string& error, const std::vector<int64_t>& arrivals);

  // The same for a message and for halos, whose partners are few.
  bool end(uint64_t number, const std::string& error, const Meeting& meeting);

  std::vector<Operation> operations() const;  // of each kind, oldest first
  std::string error() const;                  // of the first that failed
  Statistics statistics() const;
  void reset_statistics();

 private:
  // The last calls of one kind: many of one do not push out those of another.
  struct Ring {
    uint64_t next = 0;
    std::vector<Operation> operations;  // the n-th at n % kMostOperations
  };

  static constexpr size_t kNumKinds = 3;

  Operation* begin(uint64_t number);  // as find()
  Operation* find(uint64_t number);   // nullptr when it has been overwritten
  bool note_error(const std::string& error);
  bool can_be(const std::vector<int64_t>& arrivals, int64_t until_ns) const;
  // Nullptr where there is nothing more to say of it.
  Operation* close(uint64_t number, const std::string& error);

  const Identity identity_;
  const int64_t made_ns_ = now_ns();
  mutable std::mutex mutex_;  // of the members below
  uint64_t next_sequence_ = 0;
  std::array<Ring, kNumKinds> rings_;  // by kind
  std::string error_;
  Statistics statistics_;
};

}  // namespace torchtp::backend
