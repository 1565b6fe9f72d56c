// Who is on whose host: here all ranks are, and a rank that others cannot reach is alone. Real hosts:
// tests/test_hosts.py.

#include "shm/hosts.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "check.h"
#include "ranks.h"

using torchtp::test::error_of;
using torchtp::test::run_threads;
using namespace torchtp::shm;

namespace {

const auto kSoon = std::chrono::seconds(30);

// Tells the others an address that leads nowhere, as if it lay on another host.
class Elsewhere final : public Bootstrap {
 public:
  Elsewhere(Bootstrap& inner, bool away) : inner_(inner), away_(away) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::vector<std::string> all_gather(const std::string& mine) override {
    const bool address = first_ && away_;
    first_ = false;
    const std::string nowhere = "+process " + std::string(64, '0');
    std::vector<std::string> all = inner_.all_gather(address ? nowhere : mine);
    if (address) std::fill(all.begin(), all.end(), nowhere);
    return all;
  }

 private:
  Bootstrap& inner_;
  const bool away_;
  bool first_ = true;
};

void check_hosts(int size, int away, const std::vector<std::vector<int>>& expected) {
  run_threads(size, [&](Bootstrap& bootstrap) {
    Elsewhere mine(bootstrap, bootstrap.rank() == away);
    CHECK(find_hosts(mine, kSoon) == expected);
  });
}

// Comes later than the others may search.
class Late final : public Bootstrap {
 public:
  Late(Bootstrap& inner, std::chrono::milliseconds by) : inner_(inner), by_(by) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::vector<std::string> all_gather(const std::string& mine) override {
    std::this_thread::sleep_for(std::exchange(by_, std::chrono::milliseconds(0)));
    return inner_.all_gather(mine);
  }

 private:
  Bootstrap& inner_;
  std::chrono::milliseconds by_;
};

void check_a_late_rank() {
  constexpr auto kLongest = std::chrono::milliseconds(3000);
  run_threads(3, [&](Bootstrap& bootstrap) {
    Late mine(bootstrap, bootstrap.rank() == 0 ? kLongest + std::chrono::milliseconds(100) : kLongest * 0);
    CHECK(find_hosts(mine, kLongest) == std::vector<std::vector<int>>({{0, 1, 2}}));
  });
}

// Rank 1 says `nonsense` in its second answer, where the others expect the number of a rank.
class Liar final : public Bootstrap {
 public:
  Liar(Bootstrap& inner, std::string nonsense) : inner_(inner), nonsense_(std::move(nonsense)) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::vector<std::string> all_gather(const std::string& mine) override {
    std::vector<std::string> all = inner_.all_gather(mine);
    if (++calls_ == 2) all[1] = nonsense_;
    return all;
  }

 private:
  Bootstrap& inner_;
  const std::string nonsense_;
  int calls_ = 0;
};

void check_nonsense() {
  for (const std::string nonsense : {"", "+", "+x", "+-1", "+2", "+1 ", "+99999999999999999999"}) {
    run_threads(3, [&](Bootstrap& bootstrap) {
      Liar mine(bootstrap, nonsense);
      CHECK(error_of([&] { find_hosts(mine, kSoon); }).find("rank 1") != std::string::npos);
    });
  }
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"one rank is a host", [] { check_hosts(1, -1, {{0}}); }},
      {"ranks of one process share a host", [] { check_hosts(4, -1, {{0, 1, 2, 3}}); }},
      {"the first rank is away", [] { check_hosts(3, 0, {{0}, {1, 2}}); }},
      {"a rank in the middle is away", [] { check_hosts(4, 2, {{0, 1, 3}, {2}}); }},
      {"the search begins when all have come", check_a_late_rank},
      {"what a rank says is checked", check_nonsense},
  });
}
