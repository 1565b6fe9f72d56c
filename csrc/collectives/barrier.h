#pragma once

#include "collectives/call.h"

namespace torchtp::collectives {

// Returns after every rank has called it.
void barrier(const Call& call);

// The same, but its error says in the words of PyTorch's monitored_barrier which rank did not come: the first of them,
// or all. They are told on rank 0; the other ranks say that they came.
void monitored_barrier(const Call& call, bool name_all_ranks);

}  // namespace torchtp::collectives
