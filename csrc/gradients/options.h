#pragma once

#include <cstdint>

namespace torchtp::gradients {

// How gradients get into their bucket: each when it is there, or all of them in one launch when the last one is. By
// device: together on CUDA, each on the CPU.
enum class Packing { kByDevice, kEach, kTogether };

enum class Compression { kNone, kHalf, kBFloat16 };

// The same on all ranks, but for packing; compared when a reducer is made.
struct Options {
  int64_t bucket_bytes = int64_t{25} << 20;
  int64_t first_bucket_bytes = int64_t{1} << 20;  // so that communication begins early
  Compression compression = Compression::kNone;   // what fp32 and fp64 gradients travel as
  bool average = true;                            // else the sum: then gradients must be zeroed between reductions
  Packing packing = Packing::kByDevice;
};

}  // namespace torchtp::gradients
