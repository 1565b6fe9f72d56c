#include <random>
#include <set>

#include "check.h"
#include "core/interval.h"
#include "core/pull_plan.h"

using torchtp::Interval;
using torchtp::PullPlan;
using torchtp::Window;

namespace {

struct Geometry {
  int64_t extent;
  Window window;
};

class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}
  int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  Geometry geometry() { return {between(1, 40), {between(1, 8), between(1, 5), between(0, 9), between(1, 3)}}; }

 private:
  std::mt19937 engine_;
};

int64_t first_tap(const Window& window, int64_t output) { return window.stride * output - window.padding; }
int64_t last_tap(const Window& window, int64_t output) { return first_tap(window, output) + window.reach(); }

void windows_match_brute_force() {
  Draw draw(1);
  for (int i = 0; i < 20000; ++i) {
    const auto [extent, window] = draw.geometry();
    int64_t fits = 0;
    while (last_tap(window, fits) < extent + window.padding) ++fits;
    CHECK_EQUAL(torchtp::output_extent(window, extent), fits);

    const int64_t begin = draw.between(0, extent), end = draw.between(begin, extent);
    const Interval read = torchtp::read_by({begin, end}, window);
    CHECK_EQUAL(read.empty(), begin == end);
    if (begin < end) {
      CHECK_EQUAL(read.begin, first_tap(window, begin));
      CHECK_EQUAL(read.end, last_tap(window, end - 1) + 1);
    }
    const Interval readers = torchtp::readers_of({begin, end}, window);
    for (int64_t output = -60; output < 80; ++output) {
      const bool reads = begin < end && last_tap(window, output) >= begin && first_tap(window, output) < end;
      CHECK_EQUAL(readers.begin <= output && output < readers.end, reads);
    }
  }
}

void shards_cover_the_extent_once() {
  for (int64_t extent = 0; extent < 60; ++extent) {
    for (int64_t shards = 1; shards < 10; ++shards) {
      int64_t next = 0;
      for (int64_t shard = 0; shard < shards; ++shard) {
        const Interval own = torchtp::owned(extent, shards, shard);
        CHECK_EQUAL(own.begin, next);
        CHECK(own.size() == torchtp::ceil_div(extent, shards) || own.end == extent);
        next = own.end;
      }
      CHECK_EQUAL(next, extent);
    }
  }
}

void plans_deliver_every_wanted_row_from_its_owner() {
  Draw draw(2);
  for (int i = 0; i < 5000; ++i) {
    const int64_t extent = draw.between(1, 40);
    const int ranks = static_cast<int>(draw.between(1, 7));
    std::vector<Interval> wanted;
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t begin = draw.between(-6, extent + 6);
      wanted.push_back({begin, begin + draw.between(0, extent)});
    }
    bool moves = false;
    for (int rank = 0; rank < ranks; ++rank) {
      const PullPlan plan = torchtp::make_pull_plan(extent, rank, wanted);
      std::set<int64_t> rows;
      for (int64_t row = plan.kept.begin; row < plan.kept.end; ++row) rows.insert(row);
      for (const PullPlan::Part& part : plan.receives) {
        moves = true;
        CHECK(torchtp::owned(extent, ranks, part.peer).contains(part.rows));
        for (int64_t row = part.rows.begin; row < part.rows.end; ++row) CHECK(rows.insert(row).second);
        bool sent = false;
        for (const PullPlan::Part& theirs : torchtp::make_pull_plan(extent, part.peer, wanted).sends) {
          sent |= theirs.peer == rank && theirs.rows == part.rows;
        }
        CHECK(sent);
      }
      for (int64_t row = -50; row < 90; ++row) {
        const bool wants = wanted[rank].begin <= row && row < wanted[rank].end && 0 <= row && row < extent;
        CHECK_EQUAL(rows.count(row) == 1, wants);
      }
    }
    for (int rank = 0; rank < ranks; ++rank) {
      CHECK_EQUAL(torchtp::make_pull_plan(extent, rank, wanted).anyone_moves, moves);
    }
  }
}

}  // namespace

int main() {
  return torchtp::test::run(
      {{"windows_match_brute_force", windows_match_brute_force},
       {"shards_cover_the_extent_once", shards_cover_the_extent_once},
       {"plans_deliver_every_wanted_row_from_its_owner", plans_deliver_every_wanted_row_from_its_owner}});
}
