#include "backend/recorded_exchange.h"

#include <algorithm>
#include <utility>

#include "backend/comms_event.h"
#include "backend/work.h"
#include "core/clock.h"

namespace torchtp::backend {
namespace {

template <typename Messages>
int64_t bytes_of(const Messages& messages) {
  int64_t num_bytes = 0;
  for (const auto& message : messages) num_bytes += static_cast<int64_t>(message.num_bytes);
  return num_bytes;
}

}  // namespace

void RecordedExchange::end(uint64_t number, std::exception_ptr error, const Meeting& meeting) {
  const std::string why = error ? message_of(error) : "";
  if (recorder_->end(number, why, meeting) && trace_) trace_->dump("error: " + why);
}

RecordedExchange::UnderWay RecordedExchange::taken(uint64_t ticket) try {
  return under_way_.take(ticket);
} catch (...) {
  std::rethrow_exception(as_dist_error(std::current_exception()));
}

uint64_t RecordedExchange::start(std::vector<exchange::Send> sends, std::vector<exchange::Receive> receives) {
  UnderWay under_way{0, 0, bytes_of(sends), bytes_of(receives)};
  Operation operation;
  operation.kind = Operation::Kind::kHalo;
  operation.op = "halo";
  operation.dtype = c10::ScalarType::Byte;
  operation.num_bytes = operation.num_elements = std::max(under_way.sent_bytes, under_way.received_bytes);
  operation.called_ns = now_ns();
  try {
    // The ticket is the exchange's number: the same on all ranks.
    operation.sequence = inner_->start(std::move(sends), std::move(receives));
  } catch (...) {
    const auto error = as_dist_error(std::current_exception());
    end(recorder_->call(operation), error, {});
    std::rethrow_exception(error);
  }
  under_way.number = recorder_->call(operation);
  under_way.spent_ns = now_ns() - operation.called_ns;
  under_way_.put(operation.sequence, under_way);
  return operation.sequence;
}

void RecordedExchange::finish(uint64_t ticket) {
  const UnderWay under_way = taken(ticket);
  const CommsEvent event(recorder_->identity(), description_,
                         HaloCall{ticket, under_way.sent_bytes, under_way.received_bytes});
  recorder_->start(under_way.number);
  const int64_t from = now_ns();
  Meeting meeting;
  try {
    const exchange::LastSender last = inner_->finish_telling(ticket);
    const int64_t now = now_ns();
    meeting.spent_ns = under_way.spent_ns + now - from;
    meeting.partner = last.peer;
    if (last.peer >= 0) meeting.waited_ns = std::clamp(last.began_ns, from, now) - from;
  } catch (...) {
    const auto error = as_dist_error(std::current_exception());
    end(under_way.number, error, {});
    std::rethrow_exception(error);
  }
  end(under_way.number, nullptr, meeting);
}

}  // namespace torchtp::backend
