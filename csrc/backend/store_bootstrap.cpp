#include "backend/store_bootstrap.h"

#include <algorithm>
#include <numeric>
#include <thread>
#include <utility>

#include "core/deadline.h"
#include "core/format.h"

namespace torchtp::backend {
namespace {

std::vector<int> numbers(int size) {
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

constexpr auto kFirstPause = std::chrono::microseconds(100);
constexpr auto kLongestPause = std::chrono::milliseconds(10);

// What the store itself cannot do is no fault of a rank.
template <typename Step>
auto asking_store(const Step& step) {
  try {
    return step();
  } catch (const std::exception& error) {
    throw Error(std::string("the store that the ranks of a process group meet at failed: ") + error.what());
  }
}

}  // namespace

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                               std::chrono::milliseconds timeout)
    : StoreBootstrap(store, rank, size, timeout, "torchtp/" + std::to_string(asking_store([&] {
                                                   return store->add("torchtp/arrivals/" + std::to_string(rank), 1);
                                                 })),
                     numbers(size)) {}

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                               std::chrono::milliseconds timeout, std::string prefix, std::vector<int> names)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      prefix_(std::move(prefix)),
      names_(std::move(names)) {}

StoreBootstrap StoreBootstrap::among(const std::vector<int>& members) const {
  const auto place = std::find(members.begin(), members.end(), rank_) - members.begin();
  return StoreBootstrap(store_, static_cast<int>(place), static_cast<int>(members.size()), timeout_,
                        prefix_ + "/from" + std::to_string(members[0]), members);
}

std::vector<std::string> StoreBootstrap::all_gather(const std::string& mine) {
  ++round_;
  asking_store([&] {
    store_->set(key(rank_), std::vector<uint8_t>(mine.begin(), mine.end()));
    return true;
  });
  std::vector<std::string> all(size_);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) {
      all[r] = mine;
      continue;
    }
    wait_for(r);
    const std::vector<uint8_t> value = asking_store([&] { return store_->get(key(r)); });
    all[r].assign(value.begin(), value.end());
  }
  return all;
}

bool StoreBootstrap::has_come(int rank) {
  return asking_store([&] { return store_->check({key(rank)}); });
}

void StoreBootstrap::wait_for(int rank) {
  const Deadline deadline(timeout_);
  std::chrono::microseconds pause = kFirstPause;
  while (!has_come(rank)) {
    if (has_died_ && has_died_(rank) && !has_come(rank)) {
      throw Error("rank " + std::to_string(names_[rank]) +
                  " died (its process is gone) while the group was being made");
    }
    if (deadline.passed()) {
      throw Error("rank " + std::to_string(names_[rank]) +
                  " did not come to the creation of the process group within " + in_words(timeout_) + "; rank " +
                  std::to_string(names_[rank_]) + " waited for it");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, kLongestPause);
  }
}

std::string StoreBootstrap::key(int rank) const {
  return prefix_ + "/" + std::to_string(round_) + "/" + std::to_string(rank);
}

}  // namespace torchtp::backend
