#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchtp::gradients {

// What was observed since the last reset. Times only while recording.
struct Statistics {
  int64_t num_backwards = 0;
  int64_t num_buckets = 0;           // of one backward
  int64_t num_bytes = 0;             // that travelled, in all
  double communication_seconds = 0;  // at least one bucket was under way
  double hidden_seconds = 0;         // of these, while backward still ran
};

// What happened in the last backward, in order; kept while recording.
struct Event {
  enum class Kind { kReady, kStart, kEndOfBackward, kDone } kind;
  size_t index;  // of the parameter (kReady) or of the bucket (kStart, kDone)
};

struct Span {
  int64_t begin, end;  // nanoseconds
};

// Seconds covered by at least one span, and the part of that before `limit`.
struct Coverage {
  double all, before_limit;
};
Coverage cover(std::vector<Span> spans, int64_t limit);

}  // namespace torchtp::gradients
