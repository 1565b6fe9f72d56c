#include "backend/store_bootstrap.h"

#include <utility>

#include "core/error.h"

namespace torchtp::backend {

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                               std::chrono::milliseconds timeout)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      generation_(store_->add("torchtp/arrivals/" + std::to_string(rank), 1)) {}

std::vector<std::string> StoreBootstrap::all_gather(const std::string& mine) {
  ++round_;
  store_->set(key(rank_), std::vector<uint8_t>(mine.begin(), mine.end()));
  std::vector<std::string> all(size_);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) {
      all[r] = mine;
      continue;
    }
    try {
      store_->wait({key(r)}, timeout_);
    } catch (const std::exception& error) {
      throw Error("rank " + std::to_string(r) + " did not come to the creation of the process group within " +
                  std::to_string(timeout_.count()) + " ms; rank " + std::to_string(rank_) + " waited for it (" +
                  error.what() + ")");
    }
    const std::vector<uint8_t> value = store_->get(key(r));
    all[r].assign(value.begin(), value.end());
  }
  return all;
}

std::string StoreBootstrap::key(int rank) const {
  return "torchtp/" + std::to_string(generation_) + "/" + std::to_string(round_) + "/" + std::to_string(rank);
}

}  // namespace torchtp::backend
