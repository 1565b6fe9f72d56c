#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/engine.h"
#include "backend/store_bootstrap.h"
#include "core/fork_guard.h"

namespace torchtp::backend {

struct EngineOptions {
  std::chrono::milliseconds timeout;
  std::string group_name;                         // in error messages
  std::vector<uint64_t> global_ranks;             // there too; empty: the same numbers
  std::shared_ptr<shm::Whereabouts> whereabouts;  // of this process
  std::shared_ptr<ForkGuard> fork_guard;          // of this process
  Acquaintance before;
};

struct MadeEngine {
  std::shared_ptr<Engine> engine;
  std::string store_prefix;  // of this group's keys, and of no other's
};

// Finds out where the ranks are and makes the engine for that. Collective over the store, without Python's lock; throws
// DistBackendError.
MadeEngine make_engine(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const EngineOptions& options);

}  // namespace torchtp::backend
