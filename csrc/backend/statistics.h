#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchtp::backend {

// How often what took how long: buckets of an eighth of an octave to a quarter, so a quantile is right to a fifth.
class Histogram {
 public:
  void add(int64_t ns) { ++buckets_[bucket_of(ns)]; }
  int64_t quantile(double part) const;  // the middle of its bucket; 0 when nothing was added

 private:
  static size_t bucket_of(int64_t ns);

  std::array<uint32_t, 164> buckets_{};  // four for each power of two, up to 18 minutes
};

// What calls of one kind with messages of one size class have cost this rank. Of messages and halos the total is the
// time that the program has spent in them: posting and waiting.
struct Tally {
  const char* op = "";
  int size_class = 0;  // of more than 2^(size_class - 1) and up to 2^size_class bytes; 0: none or one
  uint64_t count = 0;
  uint64_t failed = 0;  // not in the figures below
  uint64_t num_bytes = 0;
  int64_t total_ns = 0;   // from when its turn came until it was done
  int64_t queued_ns = 0;  // before that, from the call
  int64_t waited_ns = 0;  // of total_ns, for the last rank to come
  int64_t shortest_ns = 0;
  int64_t longest_ns = 0;
  Histogram durations;
};

// Tallies of one process group on one rank. `op` is a name that lives as long as the program. Not thread-safe.
class Statistics {
 public:
  explicit Statistics(int num_ranks) : num_ranks_(num_ranks), waits_(num_ranks * num_ranks) {}

  static int size_class(int64_t num_bytes);

  void add(const char* op, int64_t num_bytes, int64_t queued_ns, int64_t total_ns, int64_t waited_ns);
  void add_failed(const char* op, int64_t num_bytes);
  // When each rank came to a collective: all before the last have waited for it.
  void add_arrivals(const std::vector<int64_t>& arrivals, int last);

  const std::vector<Tally>& tallies() const { return tallies_; }
  void add_wait(int rank, int late, int64_t ns) { waits_[rank * num_ranks_ + late] += ns; }
  // Nanoseconds that `rank` has waited for `late`, where that one was the last to come.
  int64_t waited(int rank, int late) const { return waits_[rank * num_ranks_ + late]; }

 private:
  Tally& tally(const char* op, int64_t num_bytes);

  int num_ranks_;
  std::vector<Tally> tallies_;  // few: a search is shorter than a tree
  std::vector<int64_t> waits_;
};

}  // namespace torchtp::backend
