// The halves of an allreduce over uneven pieces: sums at the owners, then everywhere; in heaps and out of them.

#include <algorithm>
#include <memory>

#include "check.h"
#include "collectives/pieces.h"
#include "ranks.h"
#include "shm/group.h"

// What c10::elementSize throws with, for dtypes that are none; there is no library of torch here.
namespace c10::detail {
[[noreturn]] void torchCheckFail(const char*, const char*, uint32_t, const char* message) {
  throw std::runtime_error(message);
}
}  // namespace c10::detail

using torchtp::test::run_threads;
using namespace torchtp::collectives;
using torchtp::shm::Group;

namespace {

enum class Where { kPrivate, kHeap, kSome };

float value(int rank, int64_t i) { return static_cast<float>((i * (rank + 3)) % 7); }

// Whole numbers: every order of adding them is exact.
void check_pieces(int size, const std::vector<int64_t>& counts, Where where) {
  run_threads(size, [&](torchtp::shm::Bootstrap& bootstrap) {
    torchtp::shm::GroupOptions options;
    options.slot_bytes = 4096;
    options.heap_bytes = 4 << 20;
    const auto group = Group::create(bootstrap, options);
    const int rank = group->rank();
    int64_t total = 0;
    for (const int64_t count : counts) total += count;
    const bool in_heap = where == Where::kHeap || (where == Where::kSome && rank % 2 == 0);
    std::vector<float> own(total + 1);
    float* const data = in_heap ? reinterpret_cast<float*>(group->allocate((total + 1) * sizeof(float))) : own.data();
    for (int64_t i = 0; i < total; ++i) data[i] = value(rank, i);

    std::vector<Piece> pieces;
    auto* place = reinterpret_cast<std::byte*>(data);
    for (size_t i = 0; i < counts.size(); ++i) {
      pieces.push_back({place, place, counts[i], static_cast<int>(i) % size});
      place += counts[i] * sizeof(float);
    }
    const Call call{*group, 1};
    const auto print = call.fingerprint(Kind::kAllreduce, total, c10::ScalarType::Float, ReduceOp::kSum);
    reduce_pieces(call, print, pieces, c10::ScalarType::Float, ReduceOp::kSum);
    int64_t begin = 0;
    for (const Piece& piece : pieces) {
      for (int64_t i = begin; i < begin + piece.count; ++i) {
        float sum = 0;
        for (int r = 0; r < size; ++r) sum += value(r, i);
        CHECK_EQUAL(data[i], piece.owner == rank ? sum : value(rank, i));
        if (piece.owner == rank) data[i] = sum + 1;
      }
      begin += piece.count;
    }
    // Into other memory than they come from.
    std::vector<float> everything(total + 1);
    for (size_t i = 0, at = 0; i < pieces.size(); at += pieces[i++].count) {
      pieces[i].output = reinterpret_cast<std::byte*>(everything.data() + at);
    }
    spread_pieces(call, print, pieces, c10::ScalarType::Float);
    for (int64_t i = 0; i < total; ++i) {
      float sum = 1;
      for (int r = 0; r < size; ++r) sum += value(r, i);
      CHECK_EQUAL(everything[i], sum);
    }
    group->round(print);  // nobody leaves while another still reads
  });
}

void all_sizes_and_places() {
  for (const int size : {1, 2, 3}) {
    for (const Where where : {Where::kPrivate, Where::kHeap, Where::kSome}) {
      for (const std::vector<int64_t>& counts : std::vector<std::vector<int64_t>>{
               {5}, {0, 3}, {100, 64, 0, 7}, {20'000, 1}, {9'000, 9'000, 9'000, 4'000, 2}}) {
        check_pieces(size, counts, where);
      }
    }
  }
}

void a_divisor_of_its_own() {
  std::vector<int32_t> a{7, -7}, b{4, -4}, out(2);
  reduce_inputs(reinterpret_cast<std::byte*>(out.data()),
                {reinterpret_cast<const std::byte*>(a.data()), reinterpret_cast<const std::byte*>(b.data())}, 2,
                c10::ScalarType::Int, ReduceOp::kAvg, 4);
  CHECK_EQUAL(out[0], 2);
  CHECK_EQUAL(out[1], -2);
  CHECK(partial_dtype(c10::ScalarType::Half, ReduceOp::kSum) == c10::ScalarType::Float);
  CHECK(partial_dtype(c10::ScalarType::Half, ReduceOp::kMax) == c10::ScalarType::Half);
  CHECK(partial_dtype(c10::ScalarType::Char, ReduceOp::kAvg) == c10::ScalarType::Long);
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"pieces of all sizes are reduced and spread", all_sizes_and_places},
      {"an average may divide by another number", a_divisor_of_its_own},
  });
}
