#include "shm/circle.h"

#include <algorithm>

#include "core/format.h"

namespace torchtp::shm {

namespace {

std::vector<int> ranks_in(uint64_t mask) {
  std::vector<int> ranks;
  for (; mask != 0; mask &= mask - 1) ranks.push_back(__builtin_ctzll(mask));
  return ranks;
}

}  // namespace

std::string Circle::describe() const {
  std::string text = cat("of group '", name, "' rank ", asking, " waits for rank ");
  for (const Link& link : links) {
    text += cat(link.called, ", rank ", link.called, " in ", link.wait.call, " for rank ");
  }
  return cat(text, asking);
}

// Breadth first, from whom is missed to whom those miss.
std::vector<Circle::Link> find_circle(int asking, uint64_t missing, const WaitsOf& waits_of) {
  std::vector<int> met = ranks_in(missing);
  std::vector<Circle::Link> missed_by(kMaxRanks);  // which rank, and in which wait; of those in `missing` none
  uint64_t seen = missing | uint64_t{1} << asking;
  for (size_t i = 0; i < met.size(); ++i) {
    for (const ToldWait& wait : waits_of(met[i])) {
      if (!wait.is_blocking()) continue;
      const Circle::Link link{met[i], met[i], wait};
      if (wait.blocks_for(asking)) {
        std::vector<Circle::Link> links{link};
        while ((missing >> links.back().rank & 1) == 0) links.push_back(missed_by[links.back().rank]);
        std::reverse(links.begin(), links.end());
        return links;
      }
      for (const int next : ranks_in(wait.for_ranks & ~seen)) {
        missed_by[next] = link;
        met.push_back(next);
      }
      seen |= wait.for_ranks;
    }
  }
  return {};
}

bool goes_on(const Circle& circle, int asking, uint64_t missing, const WaitsOf& waits_of) {
  const std::vector<Circle::Link>& links = circle.links;
  if (links.empty() || (missing >> links[0].rank & 1) == 0) return false;
  for (size_t i = 0; i < links.size(); ++i) {
    const int next = i + 1 < links.size() ? links[i + 1].rank : asking;
    const std::vector<ToldWait> waits = waits_of(links[i].rank);
    const bool found = std::any_of(waits.begin(), waits.end(), [&](const ToldWait& wait) {
      if (wait.since_ns != links[i].wait.since_ns) return false;
      return wait.blocks_for(next) || (circle.is_settled && wait.failed_ns != 0);
    });
    if (!found) return false;
  }
  return true;
}

}  // namespace torchtp::shm
