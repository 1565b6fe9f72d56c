#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <vector>

#include "shm/bootstrap.h"

namespace torchtp::backend {

// Bootstrap over a c10d store. A store outlives the groups made on it (torchrun's lives as long as the job) and
// prefixes repeat, so each rank counts its arrivals and keys carry that generation.
class StoreBootstrap : public shm::Bootstrap {
 public:
  StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& mine) override;

 private:
  std::string key(int rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const int64_t generation_;
  int64_t round_ = 0;
};

}  // namespace torchtp::backend
