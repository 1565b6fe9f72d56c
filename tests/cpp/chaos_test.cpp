// Ranks that are killed, stopped or slowed at a random microsecond of whatever a group does. Usage: chaos_test [trials
// [seed]]. The survivors of a kill must all raise, name the rank, leave nothing behind and work on as a new group;
// ranks that are only stopped or slowed must change nothing.

#include <dirent.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>
#include <random>

#include "check.h"
#include "collectives/allreduce.h"
#include "core/error.h"
#include "exchange/shm_exchange.h"
#include "processes.h"
#include "shm/group.h"
#include "shm/mailbox.h"

using torchtp::test::error_of;
using namespace torchtp;
using namespace torchtp::shm;
using std::chrono::milliseconds;

namespace {

enum Phase { kRendezvous, kSmallReduce, kStagedReduce, kHeapReduce, kExchangePhase, kMessages, kDestroy, kNumPhases };
constexpr const char* kPhaseNames[] = {"rendezvous",
                                       "reduce, one round",
                                       "copy-in, reduce, copy-out",
                                       "reduce in the heap",
                                       "spatial exchange",
                                       "messages",
                                       "destroy"};
// About how long a phase takes: the blow falls some time in it, or a little later.
constexpr int64_t kPhaseMicroseconds[] = {4000, 1500, 12000, 8000, 3000, 1500, 300};
enum Blow { kKill, kStop, kSlow, kNumBlows };
constexpr const char* kBlowNames[] = {"killed", "stopped", "slowed"};

struct Trial {
  int size, victim;
  Phase phase;
  Blow blow;
  int64_t after_us;
};

// What the parent sees of a rank.
struct Diary {
  std::atomic<int> phase;
  std::atomic<int64_t> blow_at;    // nanoseconds, when it was to fall
  std::atomic<int64_t> raised_at;  // 0: nothing was raised
  char error[1000];
};

int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// The kernel delivers the signal, wherever this process then is.
void strike_myself(int signal, int64_t after_us) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = signal;
  timer_t timer;
  CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
  itimerspec when{};
  when.it_value.tv_nsec = after_us * 1000 + 1;
  CHECK(timer_settime(timer, 0, &when, nullptr) == 0);
}

class Pattern final : public exchange::Source {
 public:
  explicit Pattern(int value) : value_(value) {}
  void read(size_t, std::byte* out, size_t num_bytes) const override { std::memset(out, value_, num_bytes); }

 private:
  int value_;
};

class Same final : public exchange::Sink {
 public:
  explicit Same(int value) : value_(static_cast<std::byte>(value)) {}
  void write(uint32_t, size_t, const std::byte* in, size_t num_bytes) override {
    CHECK(std::all_of(in, in + num_bytes, [&](std::byte byte) { return byte == value_; }));
  }

 private:
  std::byte value_;
};

GroupOptions options() {
  GroupOptions options;
  options.slot_bytes = size_t{128} << 10;
  options.heap_bytes = size_t{16} << 20;
  options.timeout = std::chrono::minutes(5);  // longer than a trial may last: a death is seen
  options.name = "chaos";
  options.describe = collectives::describe;
  options.warn = [](const std::string&) {};
  return options;
}

void allreduce(Group& group, uint64_t sequence, float* data, int64_t count) {
  std::iota(data, data + count, static_cast<float>(group.rank()));
  collectives::allreduce({group, sequence}, reinterpret_cast<std::byte*>(data), count, c10::ScalarType::Float,
                         collectives::ReduceOp::kSum);
  const int n = group.size();
  for (const int64_t i : {int64_t{0}, count / 2, count - 1}) {
    CHECK_EQUAL(data[i], static_cast<float>(n * i + n * (n - 1) / 2));
  }
}

// Tells when the ranks have introduced themselves: who dies before, without a word, is missed only by the timeout.
class Introducing final : public Bootstrap {
 public:
  Introducing(Bootstrap& inner, std::function<void()> introduced) : inner_(inner), introduced_(std::move(introduced)) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::vector<std::string> all_gather(const std::string& mine) override { return inner_.all_gather(mine); }
  void watch(std::function<bool(int)> has_died) override {
    inner_.watch(std::move(has_died));
    introduced_();
  }

 private:
  Bootstrap& inner_;
  std::function<void()> introduced_;
};

// Everything a group does, phase by phase; `enter` is told of each.
void live(Bootstrap& bootstrap, std::shared_ptr<Group>& group, const std::function<void(Phase)>& enter) {
  Introducing introducing(bootstrap, [&] { enter(kRendezvous); });
  group = Group::create(introducing, options());
  const int rank = group->rank(), size = group->size(), right = (rank + 1) % size, left = (rank + size - 1) % size;
  std::vector<float> memory(size_t{1} << 20);
  uint64_t sequence = 0;
  enter(kSmallReduce);
  for (int i = 0; i < 20; ++i) allreduce(*group, ++sequence, memory.data(), 256);
  enter(kStagedReduce);
  for (int i = 0; i < 2; ++i) allreduce(*group, ++sequence, memory.data(), 1 << 20);
  enter(kHeapReduce);
  auto* const heap = reinterpret_cast<float*>(group->allocate(size_t{4} << 20));
  for (int i = 0; i < 3; ++i) allreduce(*group, ++sequence, heap, 1 << 20);
  enter(kExchangePhase);
  exchange::ShmExchange exchange(group);
  for (int i = 0; i < 5; ++i) {
    exchange.finish(exchange.start({{right, 0, 200'000, std::make_shared<Pattern>(rank + i)}},
                                   {{left, 200'000, std::make_shared<Same>(left + i)}}));
  }
  enter(kMessages);
  Mailbox mailbox(group);
  for (int i = 0; i < 20; ++i) {
    int mine = rank * 100 + i, theirs = -1;
    const auto sending = mailbox.post_send(right, i, &mine, sizeof(mine));
    mailbox.recv(left, i, &theirs, sizeof(theirs));
    mailbox.wait(sending);
    CHECK_EQUAL(theirs, left * 100 + i);
  }
  enter(kDestroy);
}

int num_descriptors() {
  int count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

bool maps_segments() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:torchtp") != std::string::npos) return true;
  }
  return false;
}

// A rank of the trial: lives, is struck or survives, and then works on in a group of the survivors.
void take_part(const Trial& trial, std::byte* pages, std::byte* survivors_pages, Diary* diaries, int rank) {
  Diary& diary = diaries[rank];
  const int descriptors = num_descriptors();
  std::shared_ptr<Group> group;
  std::string error;
  try {
    test::ProcessBootstrap bootstrap(pages, rank, trial.size);
    live(bootstrap, group, [&](Phase phase) {
      diary.phase = phase;
      if (rank != trial.victim || phase != trial.phase) return;
      diary.blow_at = now() + trial.after_us * 1000;
      strike_myself(trial.blow == kKill ? SIGKILL : SIGSTOP, trial.after_us);
    });
  } catch (const Error& raised) {
    error = raised.what();
    diary.raised_at = now();
    error.copy(diary.error, sizeof(diary.error) - 1);
  }
  if (!error.empty() && group) CHECK_EQUAL(error_of([&] { group->round({}); }), error);
  group.reset();
  CHECK(!maps_segments());
  // A bootstrap of processes has none of its own.
  CHECK_EQUAL(num_descriptors(), descriptors);
  if (trial.blow != kKill || rank == trial.victim) return;
  test::ProcessBootstrap bootstrap(survivors_pages, rank - (rank > trial.victim), trial.size - 1);
  const auto survivors = Group::create(bootstrap, options());
  std::vector<float> memory(1000);
  allreduce(*survivors, 1, memory.data(), 1000);
}

// A file that all ranks of a trial map.
class Shared {
 public:
  explicit Shared(size_t num_bytes) : file_(Fd::memory("chaos")) {
    CHECK(ftruncate(file_.get(), static_cast<off_t>(num_bytes)) == 0);
    mapping_ = std::make_unique<Mapping>(file_, num_bytes);
  }
  std::byte* data() const { return mapping_->data(); }

 private:
  Fd file_;
  std::unique_ptr<Mapping> mapping_;
};

// Waits for all ranks; continues whoever was stopped. True if nobody hung and all but the victim ended well.
bool reap(const Trial& trial, std::vector<pid_t>& children, std::mt19937& random) {
  const int64_t give_up = now() + int64_t{40} * 1'000'000'000;
  int blows_left = trial.blow == kSlow ? 4 : 0;
  int missing = trial.size;
  bool well = true;
  while (missing > 0) {
    for (int rank = 0; rank < trial.size; ++rank) {
      int status = 0;
      if (children[rank] == 0 || waitpid(children[rank], &status, WNOHANG | WUNTRACED) <= 0) continue;
      if (WIFSTOPPED(status)) {
        usleep(trial.blow == kSlow ? random() % 3000 : random() % 80'000);
        kill(children[rank], SIGCONT);
        if (blows_left-- > 0) {
          usleep(random() % 1000);
          kill(children[rank], SIGSTOP);
        }
        continue;
      }
      children[rank] = 0;
      --missing;
      const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && trial.blow == kKill;
      well = well && (status == 0 || (rank == trial.victim && killed));
    }
    if (now() > give_up) {
      for (const pid_t child : children) {
        if (child != 0) kill(child, SIGKILL);
      }
      return false;
    }
    usleep(200);
  }
  return well;
}

class Chaos {
 public:
  explicit Chaos(unsigned seed) : random_(seed) {}

  bool run_one() {
    Trial trial{};
    trial.size = 2 + static_cast<int>(random_() % 3);
    trial.victim = static_cast<int>(random_() % trial.size);
    trial.phase = static_cast<Phase>(random_() % kNumPhases);
    trial.blow = random_() % 2 ? kKill : static_cast<Blow>(random_() % kNumBlows);
    trial.after_us = static_cast<int64_t>(random_() % (kPhaseMicroseconds[trial.phase] + 1));
    const size_t page_bytes = trial.size * sizeof(test::ProcessBootstrap::Page);
    const Shared pages(page_bytes), survivors_pages(page_bytes), diary_pages(trial.size * sizeof(Diary));
    auto* const diaries = reinterpret_cast<Diary*>(diary_pages.data());
    std::vector<pid_t> children;
    std::fflush(nullptr);
    for (int rank = 0; rank < trial.size; ++rank) {
      children.push_back(fork());
      if (children.back() != 0) continue;
      int status = 0;
      try {
        take_part(trial, pages.data(), survivors_pages.data(), diaries, rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        status = 1;
      }
      _exit(status);
    }
    const bool well = reap(trial, children, random_);
    const std::string wrong = well ? judge(trial, diaries) : "a rank hung or ended badly";
    if (wrong.empty()) return true;
    std::fprintf(stderr, "rank %d of %d %s in phase '%s' after %ld us: %s\n", trial.victim, trial.size,
                 kBlowNames[trial.blow], kPhaseNames[trial.phase], static_cast<long>(trial.after_us), wrong.c_str());
    for (int rank = 0; rank < trial.size; ++rank) {
      std::fprintf(stderr, "  rank %d in '%s': %s\n", rank, kPhaseNames[diaries[rank].phase], diaries[rank].error);
    }
    return false;
  }

  void report() const {
    for (const auto& [phase, latencies] : latencies_) print(kPhaseNames[phase], latencies);
    std::vector<double> all;
    for (const auto& entry : latencies_) all.insert(all.end(), entry.second.begin(), entry.second.end());
    print("all phases", all);
  }

 private:
  // What is wrong with what the ranks wrote, if anything.
  std::string judge(const Trial& trial, const Diary* diaries) {
    const Diary& victim = diaries[trial.victim];
    int num_raised = 0;
    std::string first;
    for (int rank = 0; rank < trial.size; ++rank) {
      const Diary& diary = diaries[rank];
      if (rank == trial.victim || diary.raised_at == 0) continue;
      ++num_raised;
      const std::string error = diary.error;
      if (error.find("rank " + std::to_string(trial.victim) + " died") == std::string::npos) return "it is not named";
      if (victim.phase > kRendezvous && error.find(" waited in ") == std::string::npos) return "the call is not named";
      // While a group is made each rank finds out by itself.
      if (diary.phase > kRendezvous && !first.empty() && error != first) return "the errors differ";
      if (diary.phase > kRendezvous) first = error;
      latencies_[trial.phase].push_back((diary.raised_at - victim.blow_at) * 1e-6);
    }
    if (trial.blow != kKill && num_raised > 0) return "somebody raised";
    // Nobody needs who has done all its part.
    if (num_raised == 0 && victim.blow_at != 0 && victim.phase < kMessages && trial.blow == kKill)
      return "nobody raised";
    if (num_raised > 0 && num_raised < trial.size - 1 && victim.phase < kMessages) return "not all raised";
    return "";
  }

  static void print(const char* what, std::vector<double> latencies) {
    if (latencies.empty()) return;
    std::sort(latencies.begin(), latencies.end());
    const auto at = [&](double share) { return latencies[static_cast<size_t>(share * (latencies.size() - 1))]; };
    std::printf("%-28s %4zu raised, ms after the kill: median %.1f, 99th percentile %.1f, longest %.1f\n", what,
                latencies.size(), at(0.5), at(0.99), latencies.back());
  }

  std::mt19937 random_;
  std::map<Phase, std::vector<double>> latencies_;
};

}  // namespace

int main(int argc, char** argv) {
  const int trials = argc > 1 ? std::atoi(argv[1]) : 50;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : std::random_device()();
  std::printf("%d trials, seed %u\n", trials, seed);
  Chaos chaos(seed);
  int failed = 0;
  for (int trial = 0; trial < trials; ++trial) failed += chaos.run_one() ? 0 : 1;
  chaos.report();
  std::printf("%d of %d trials failed\n", failed, trials);
  return failed == 0 ? 0 : 1;
}
