#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "backend/work.h"
#include "exchange/exchange.h"

namespace torchtp::backend {

// An exchange whose errors are those of the group's other calls: DistBackendError.
class DistErrorExchange final : public exchange::Exchange {
 public:
  explicit DistErrorExchange(std::shared_ptr<exchange::Exchange> inner) : inner_(std::move(inner)) {}

  const std::shared_ptr<exchange::Exchange>& inner() const { return inner_; }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  uint64_t start(std::vector<exchange::Send> sends, std::vector<exchange::Receive> receives) override {
    try {
      return inner_->start(std::move(sends), std::move(receives));
    } catch (...) {
      std::rethrow_exception(as_dist_error(std::current_exception()));
    }
  }

  void finish(uint64_t ticket) override {
    try {
      inner_->finish(ticket);
    } catch (...) {
      std::rethrow_exception(as_dist_error(std::current_exception()));
    }
  }

 private:
  const std::shared_ptr<exchange::Exchange> inner_;
};

}  // namespace torchtp::backend
