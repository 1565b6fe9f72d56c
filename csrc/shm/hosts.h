#pragma once

#include <chrono>
#include <vector>

#include "shm/bootstrap.h"

namespace torchtp::shm {

// The ranks of each host, ascending; hosts in the order of their first ranks. Ranks are on one host when the first of
// them could hand a file descriptor over to the others: names, addresses and LOCAL_RANK prove nothing. Ranks of
// different users or network namespaces cannot, and count as different hosts. Collective; throws Error, the same on all
// ranks that reached it. `longest`: from when all have come; how long they may take to is the bootstrap's affair.
std::vector<std::vector<int>> find_hosts(Bootstrap& bootstrap, std::chrono::milliseconds longest);

}  // namespace torchtp::shm
