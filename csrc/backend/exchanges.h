#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/pull_plan.h"
#include "exchange/exchange.h"

namespace torchtp::backend {

// What this rank has sent over one group since it was made, or would have sent where exchanges are only planned.
struct Traffic {
  std::atomic<uint64_t> num_bytes{0};
  std::atomic<uint64_t> num_exchanges{0};
  std::atomic<uint64_t> num_beyond_neighbours{0};  // of these, with a rank that is not the next or the previous one
};

// One process group as the spatial ops see it. Keeps no group alive: after destroy_process_group a name resolves anew.
struct SpatialGroup {
  int rank = 0;
  int size = 1;
  std::shared_ptr<exchange::Exchange> exchange;  // shared memory on torchtp, point-to-point on any other backend
  std::shared_ptr<PullPlans> plans;
  std::shared_ptr<Traffic> traffic;
  bool planned = false;  // ops on meta tensors count their traffic
};

// kAuto: shared memory where the backend is torchtp, else point-to-point. kNone moves nothing, for benchmarks. kPlanned
// moves nothing, and ops on meta tensors count what they would move.
enum class ExchangeKind { kAuto, kPointToPoint, kNone, kPlanned };

// The group of that name in c10d's registry; throws what c10d throws when there is none.
SpatialGroup spatial_group(const std::string& group_name);

// How halos of that group travel from now on. Every rank of the group calls it at the same place, with nothing under
// way.
void set_exchange(const std::string& group_name, ExchangeKind kind);

}  // namespace torchtp::backend
