// An allreduce wherever the buffers lie: in memory of their own, in the ranks' heaps, or some here and some there.

#include "collectives/allreduce.h"

#include "check.h"
#include "collectives/reduce.h"
#include "ranks.h"

using torchtp::test::run_threads;
using namespace torchtp;

namespace {

constexpr int kSize = 3;

// Bit r of `in_heap`: rank r's buffer lies in its heap. Whole numbers, so that every order of adding gives the same.
void sums_are_right(unsigned in_heap, int root) {
  run_threads(kSize, [&](shm::Bootstrap& bootstrap) {
    shm::GroupOptions options;
    options.heap_bytes = size_t{4} << 20;
    const auto group = shm::Group::create(bootstrap, options);
    const int rank = group->rank();
    uint64_t sequence = 0;
    for (const size_t count : {0, 1, 1000, 2048, 2049, 5000, 8192, 8193, 300'000}) {
      std::vector<float> own(count);
      const bool shared = (in_heap >> rank & 1) != 0;
      auto* const data = shared ? reinterpret_cast<float*>(group->allocate(count * sizeof(float) + 1)) : own.data();
      for (int turn = 0; turn < 3; ++turn) {
        for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>((rank + 1) * (i % 1000) + turn);
        auto* const bytes = reinterpret_cast<std::byte*>(data);
        const collectives::Call call{*group, ++sequence};
        const auto number = static_cast<int64_t>(count);
        if (root < 0) {
          collectives::allreduce(call, bytes, number, c10::ScalarType::Float, collectives::ReduceOp::kSum);
        } else {
          collectives::reduce(call, bytes, number, c10::ScalarType::Float, collectives::ReduceOp::kSum, root);
          if (rank != root) continue;
        }
        for (size_t i = 0; i < count; ++i) CHECK(data[i] == static_cast<float>(6 * (i % 1000) + 3 * turn));
      }
      if (shared) group->free(reinterpret_cast<std::byte*>(data));
    }
  });
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"no buffer in a heap", [] { sums_are_right(0b000, -1); }},
      {"all buffers in heaps", [] { sums_are_right(0b111, -1); }},
      {"some buffers in heaps", [] { sums_are_right(0b101, -1); }},
      {"reduced to one rank", [] { sums_are_right(0b000, 1); }},
      {"reduced to one rank in heaps", [] { sums_are_right(0b111, 1); }},
      {"reduced to one rank, some in heaps", [] { sums_are_right(0b010, 2); }},
  });
}
