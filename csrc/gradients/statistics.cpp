#include "gradients/statistics.h"

#include <algorithm>

namespace torchtp::gradients {

Coverage cover(std::vector<Span> spans, int64_t limit) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  int64_t all = 0, before = 0, covered = INT64_MIN;
  for (const Span& span : spans) {
    const int64_t begin = std::max(span.begin, covered);
    if (span.end <= begin) continue;
    all += span.end - begin;
    before += std::max<int64_t>(0, std::min(span.end, limit) - begin);
    covered = span.end;
  }
  return {static_cast<double>(all) * 1e-9, static_cast<double>(before) * 1e-9};
}

}  // namespace torchtp::gradients
