#include "collectives/barrier.h"

#include "core/error.h"
#include "core/format.h"

namespace torchtp::collectives {

void barrier(const Call& call) { call.group.round(call.fingerprint(Kind::kBarrier, 0, c10::ScalarType::Undefined)); }

void monitored_barrier(const Call& call, bool name_all_ranks) {
  call.group.check();  // what ended the group earlier is told as it is
  try {
    barrier(call);
  } catch (const Error& error) {
    const std::vector<int> absent = call.group.absent();
    if (absent.empty()) throw;
    const int rank = call.group.rank();
    const auto limit = call.group.round_timeout().count();
    std::string what;
    if (rank != 0) {
      what = cat("Rank ", rank, " successfully reached monitoredBarrier, but received errors while waiting for ",
                 "send/recv from rank 0");
    } else if (limit == 0) {
      what = cat("Rank ", rank, " timed out in monitoredBarrier after 0 ms");
    } else {
      const bool several = name_all_ranks && absent.size() > 1;
      what = cat(several ? "Ranks " : "Rank ", absent[0]);
      for (size_t i = 1; several && i < absent.size(); ++i) what += cat(", ", absent[i]);
      what += cat(" failed to pass monitoredBarrier in ", limit, " ms");
    }
    throw Error(cat(what, ": ", error.what()));
  }
}

}  // namespace torchtp::collectives
