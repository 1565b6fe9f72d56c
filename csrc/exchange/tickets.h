#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/format.h"

namespace torchtp::exchange {

// What was started and not yet finished, each under its number. Thread-safe.
template <typename UnderWay>
class Tickets {
 public:
  uint64_t next() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++last_;
  }

  void put(uint64_t ticket, UnderWay under_way) {
    const std::lock_guard<std::mutex> lock(mutex_);
    under_way_.emplace(ticket, std::move(under_way));
  }

  uint64_t put(UnderWay under_way) {
    const uint64_t ticket = next();
    put(ticket, std::move(under_way));
    return ticket;
  }

  // Throws for a ticket that is not under way: each is finished once.
  UnderWay take(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = under_way_.find(ticket);
    if (found == under_way_.end()) throw Error(cat("no exchange ", ticket, " is under way"));
    UnderWay under_way = std::move(found->second);
    under_way_.erase(found);
    return under_way;
  }

 private:
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::map<uint64_t, UnderWay> under_way_;
};

}  // namespace torchtp::exchange
