#pragma once

#include <cstdint>

namespace torchtp::gradients {

enum class Compression { kNone, kHalf, kBFloat16 };

// The same on all ranks; compared when a reducer is made.
struct Options {
  int64_t bucket_bytes = int64_t{25} << 20;
  int64_t first_bucket_bytes = int64_t{1} << 20;  // so that communication begins early
  Compression compression = Compression::kNone;   // what fp32 and fp64 gradients travel as
  bool average = true;                            // else the sum: then gradients must be zeroed between reductions
};

}  // namespace torchtp::gradients
