#include "collectives/allreduce.h"

#include "collectives/reduce_rounds.h"

namespace torchtp::collectives {

void allreduce(const Call& call, std::byte* data, int64_t count, c10::ScalarType dtype, ReduceOp op) {
  reduce_rounds(call, call.fingerprint(Kind::kAllreduce, count, dtype, op), data, count, dtype, op, kEveryRank);
}

}  // namespace torchtp::collectives
