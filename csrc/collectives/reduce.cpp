#include "collectives/reduce.h"

#include "collectives/reduce_rounds.h"

namespace torchtp::collectives {

void reduce(const Call& call, std::byte* data, int64_t count, c10::ScalarType dtype, ReduceOp op, int root) {
  reduce_rounds(call, call.fingerprint(Kind::kReduce, count, dtype, op, root), data, count, dtype, op, root);
}

}  // namespace torchtp::collectives
