#include "backend/statistics.h"

#include <algorithm>
#include <numeric>

namespace torchtp::backend {

namespace {

constexpr int kParts = 4;  // of an octave

int log2_of(uint64_t value) { return value == 0 ? 0 : 63 - __builtin_clzll(value); }

}  // namespace

size_t Histogram::bucket_of(int64_t ns) {
  const uint64_t value = std::max<int64_t>(ns, 1);
  const int octave = log2_of(value);
  // The two bits below the highest one.
  const uint64_t part = octave >= 2 ? value >> (octave - 2) & 3 : (value << (2 - octave)) & 3;
  return std::min<size_t>(kParts * octave + part, 163);
}

int64_t Histogram::quantile(double part) const {
  const uint64_t count = std::accumulate(buckets_.begin(), buckets_.end(), uint64_t{0});
  if (count == 0) return 0;
  auto left = static_cast<uint64_t>(part * static_cast<double>(count - 1));
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (left < buckets_[bucket]) {
      const double octave = static_cast<double>(uint64_t{1} << (bucket / kParts));
      return static_cast<int64_t>(octave * (1 + (static_cast<double>(bucket % kParts) + 0.5) / kParts));
    }
    left -= buckets_[bucket];
  }
  return 0;
}

int Statistics::size_class(int64_t num_bytes) { return num_bytes <= 1 ? 0 : log2_of(num_bytes - 1) + 1; }

Tally& Statistics::tally(const char* op, int64_t num_bytes) {
  const int size = size_class(num_bytes);
  for (Tally& known : tallies_) {
    if (known.op == op && known.size_class == size) return known;
  }
  tallies_.emplace_back();
  tallies_.back().op = op;
  tallies_.back().size_class = size;
  return tallies_.back();
}

void Statistics::add(const char* op, int64_t num_bytes, int64_t queued_ns, int64_t total_ns, int64_t waited_ns) {
  Tally& sum = tally(op, num_bytes);
  sum.shortest_ns = sum.count == 0 ? total_ns : std::min(sum.shortest_ns, total_ns);
  sum.longest_ns = std::max(sum.longest_ns, total_ns);
  ++sum.count;
  sum.num_bytes += num_bytes;
  sum.total_ns += total_ns;
  sum.queued_ns += queued_ns;
  sum.waited_ns += waited_ns;
  sum.durations.add(total_ns);
}

void Statistics::add_failed(const char* op, int64_t num_bytes) { ++tally(op, num_bytes).failed; }

void Statistics::add_arrivals(const std::vector<int64_t>& arrivals, int last) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    waits_[rank * num_ranks_ + last] += arrivals[last] - arrivals[rank];
  }
}

}  // namespace torchtp::backend
