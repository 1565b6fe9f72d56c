#include "gradients/bucket_plan.h"

#include <algorithm>
#include <map>

namespace torchtp::gradients {

std::vector<std::vector<size_t>> plan_buckets(const std::vector<Traveller>& travellers,
                                              const std::vector<int64_t>& order, int64_t first_bytes,
                                              int64_t max_bytes) {
  struct Open {
    std::vector<size_t> members;
    int64_t num_bytes = 0;
    size_t last = 0;  // position in `order` of the member that comes last
  };
  std::vector<Open> closed;
  std::map<std::string, Open> open;
  for (size_t position = 0; position < order.size(); ++position) {
    const auto index = static_cast<size_t>(order[position]);
    const Traveller& traveller = travellers[index];
    Open& bucket = open[traveller.kind];
    bucket.members.push_back(index);
    bucket.num_bytes += traveller.num_bytes;
    bucket.last = position;
    if (bucket.num_bytes >= (closed.empty() ? first_bytes : max_bytes)) {
      closed.push_back(std::move(bucket));
      open.erase(traveller.kind);
    }
  }
  for (auto& [kind, bucket] : open) closed.push_back(std::move(bucket));
  std::sort(closed.begin(), closed.end(), [](const Open& a, const Open& b) { return a.last < b.last; });
  std::vector<std::vector<size_t>> plan;
  for (Open& bucket : closed) plan.push_back(std::move(bucket.members));
  return plan;
}

}  // namespace torchtp::gradients
