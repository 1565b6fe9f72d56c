#pragma once

#include "collectives/call.h"

namespace torchtp::collectives {

// Returns after every rank has called it.
void barrier(const Call& call);

}  // namespace torchtp::collectives
