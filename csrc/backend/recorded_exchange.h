#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/record.h"
#include "backend/trace.h"
#include "exchange/exchange.h"
#include "exchange/tickets.h"

namespace torchtp::backend {

// An exchange whose errors are those of the group's other calls, DistBackendError, and which stands in the statistics
// and traces of the group and in what torch.profiler shows. Thread-safe.
class RecordedExchange final : public exchange::Exchange {
 public:
  RecordedExchange(std::shared_ptr<exchange::Exchange> inner, std::shared_ptr<Recorder> recorder,
                   std::shared_ptr<Trace> trace, std::string description)
      : inner_(std::move(inner)),
        recorder_(std::move(recorder)),
        trace_(std::move(trace)),
        description_(std::move(description)) {}

  const std::shared_ptr<exchange::Exchange>& inner() const { return inner_; }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  uint64_t start(std::vector<exchange::Send> sends, std::vector<exchange::Receive> receives) override;
  void finish(uint64_t ticket) override;

 private:
  struct UnderWay {
    uint64_t number;  // the recorder's
    int64_t spent_ns;
    int64_t sent_bytes, received_bytes;
  };

  UnderWay taken(uint64_t ticket);
  void end(uint64_t number, std::exception_ptr error, const Meeting& meeting);

  const std::shared_ptr<exchange::Exchange> inner_;
  const std::shared_ptr<Recorder> recorder_;
  const std::shared_ptr<Trace> trace_;  // may be null
  const std::string description_;       // of the group
  exchange::Tickets<UnderWay> under_way_;
};

}  // namespace torchtp::backend
