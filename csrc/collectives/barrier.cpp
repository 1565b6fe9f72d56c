#include "collectives/barrier.h"

namespace torchtp::collectives {

void barrier(const Call& call) { call.group.round(call.fingerprint(Kind::kBarrier, 0, c10::ScalarType::Undefined)); }

}  // namespace torchtp::collectives
