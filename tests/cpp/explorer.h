#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

// Goes through every order in which a few ranks can come to the words they share.
namespace torchtp::test {

// Ranks are fibers of one thread; before each access to a shared word the scheduler may go on with another rank. The
// search is depth first and turns back at a state that has been seen: the shared words, and for each rank what it has
// read since its last restart(). To turn back it brings back bytes that it kept on the way, of the ranks' stacks and of
// the program's memory, and goes on from there. Accesses are sequentially consistent; a rank's consecutive relaxed ones
// count as one.
class Explorer {
 public:
  // Kept as they are: neither they nor a rank's stack at its accesses own memory elsewhere (for exceptions: throws()).
  struct Bytes {
    void* begin;
    size_t size;
  };
  struct Program {
    int num_ranks = 0;
    int victim = -1;                      // may die before any access
    std::vector<Bytes> memory;            // all that ranks change beside their stacks
    std::function<void(int)> run;         // one rank; an exception that leaves it is a failure
    std::function<void()> check_the_end;  // all have ended or died
    std::function<uint64_t()> more_state = [] { return uint64_t{0}; };  // what no word and no rank's reading tells
    bool relaxed_too = true;  // or a rank's relaxed accesses are one with what it does before
  };

  explicit Explorer(Program program);
  Explorer(const Explorer&) = delete;
  Explorer& operator=(const Explorer&) = delete;

  // Returns how many states there are. Throws what the first failing run says, and its order of ranks.
  uint64_t explore();

  // For the program's ranks.
  static Explorer& current() { return *current_; }
  void point();                 // another rank may run now
  void restart(uint64_t what);  // `what` tells all that this rank knows from here on
  uint64_t known() const { return ranks_[running_].known; }
  uint64_t last_read() const { return ranks_[running_].last_read; }
  bool owns(int rank) const { return rank == running_; }
  bool pause();  // until a shared word changes; false when no other rank can go on
  bool is_dead(int rank, bool or_has_ended);
  bool has_died(int rank) const { return ranks_[rank].state == State::kDead; }
  // From before a rank throws to after it has caught, what it owns is not in bytes alone: none are kept meanwhile.
  void throws(bool now) { ranks_[running_].throws = now; }

  // For Model::Atomic.
  void access(bool relaxed);
  void learned(uint64_t value);
  void changed(const void* word, uint64_t before, uint64_t after);
  void sleep(const void* word);
  void wake(const void* word);
  void note_failure(const std::string& why) { failure_ = why; }  // ends the run at the next access

 private:
  enum class State : uint8_t { kReady, kSleeping, kPausing, kEnded, kDead };
  enum class Kind : uint8_t { kRun, kTimeOut, kDie };
  struct Choice {
    Kind kind;
    int rank;
  };
  struct Rank {
    State state = State::kReady;
    uint64_t known = 0;
    uint64_t last_read = 0;
    const void* word = nullptr;  // that it sleeps on
    bool relaxed = false;        // its last access
    bool timed_out = false;
    bool begun = false;
    bool throws = false;
    ucontext_t context;  // to begin with; from then on `jump`, which makes no system call
    jmp_buf jump;
    char* stack_top = nullptr;  // the lowest byte in use: stacks grow downwards
    char* stack_end = nullptr;
  };
  struct Step {
    std::vector<Choice> choices;
    size_t taken = 0;
    std::vector<char> before;  // all bytes, where there is more than one choice and nobody throws
  };

  static void enter() { current_->body(); }
  void body();
  void begin();
  bool may_keep() const;
  std::vector<char> keep();
  void bring_back(const std::vector<char>& kept);
  void go_on_at_end_of_path();
  template <typename Visit>
  void for_all_bytes(Visit&& visit);
  void follow(const Choice& choice);
  std::vector<Choice> choices() const;
  uint64_t state() const;
  void give_up_control();
  [[noreturn]] void fail(const std::string& why) const;

  static inline Explorer* current_ = nullptr;

  const Program program_;
  std::vector<Rank> ranks_;
  std::vector<char> stacks_;
  jmp_buf scheduler_;
  int running_ = -1;
  uint64_t words_ = 0;  // a sum over all shared words
  std::string failure_;
  std::vector<Step> path_;
  std::unordered_set<uint64_t> seen_;
};

constexpr size_t kStackBytes = size_t{128} << 10;
constexpr ptrdiff_t kBelowFrame = 512;  // more than a frame of give_up_control() has below its address
constexpr size_t kMostSteps = 3000;     // a run of more goes round in a circle

inline uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x7f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

inline Explorer::Explorer(Program program)
    : program_(std::move(program)), ranks_(program_.num_ranks), stacks_(program_.num_ranks * kStackBytes) {}

inline uint64_t Explorer::explore() {
  current_ = this;
  seen_.clear();
  path_.clear();
  begin();
  for (;;) {
    while (seen_.insert(state()).second) {
      Step step{choices(), 0, {}};
      if (step.choices.empty()) {
        try {
          program_.check_the_end();
        } catch (const std::exception& error) {
          fail(error.what());
        }
        break;
      }
      if (path_.empty() || (step.choices.size() > 1 && may_keep())) step.before = keep();
      path_.push_back(std::move(step));
      follow(path_.back().choices[0]);
      if (path_.size() > kMostSteps) fail("the ranks do not come to an end");
    }
    while (!path_.empty() && path_.back().taken + 1 == path_.back().choices.size()) path_.pop_back();
    if (path_.empty()) return seen_.size();
    ++path_.back().taken;
    go_on_at_end_of_path();
  }
}

inline void Explorer::go_on_at_end_of_path() {
  size_t i = path_.size() - 1;
  while (path_[i].before.empty()) --i;
  bring_back(path_[i].before);
  for (; i < path_.size(); ++i) follow(path_[i].choices[path_[i].taken]);
}

inline void Explorer::begin() {
  words_ = 0;
  running_ = -1;
  failure_.clear();
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i] = {};
    char* const stack = stacks_.data() + i * kStackBytes;
    getcontext(&rank.context);
    rank.context.uc_stack.ss_sp = stack;
    rank.context.uc_stack.ss_size = kStackBytes;
    makecontext(&rank.context, &Explorer::enter, 0);
    rank.stack_end = stack + kStackBytes;
    rank.stack_top = rank.stack_end - kBelowFrame;  // makecontext has written there
  }
}

// The ranks come first: they tell how much of the stacks is in use.
template <typename Visit>
void Explorer::for_all_bytes(Visit&& visit) {
  visit(&words_, sizeof(words_));
  visit(ranks_.data(), ranks_.size() * sizeof(Rank));
  for (Rank& rank : ranks_) {
    if (rank.state < State::kEnded) visit(rank.stack_top, rank.stack_end - rank.stack_top);
  }
  for (const Bytes& bytes : program_.memory) visit(bytes.begin, bytes.size);
}

inline bool Explorer::may_keep() const {
  return std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.throws; });
}

inline std::vector<char> Explorer::keep() {
  std::vector<char> kept;
  for_all_bytes([&](const void* begin, size_t size) {
    const char* bytes = static_cast<const char*>(begin);
    kept.insert(kept.end(), bytes, bytes + size);
  });
  return kept;
}

inline void Explorer::bring_back(const std::vector<char>& kept) {
  const char* next = kept.data();
  for_all_bytes([&](void* begin, size_t size) {
    std::memcpy(begin, next, size);
    next += size;
  });
}

inline void Explorer::body() {
  const int rank = running_;
  try {
    program_.run(rank);
  } catch (const std::exception& error) {
    failure_ = "rank " + std::to_string(rank) + ": " + error.what();
  }
  ranks_[rank].state = State::kEnded;
  learned(~uint64_t{0});
  _longjmp(scheduler_, 1);
}

inline void Explorer::follow(const Choice& choice) {
  Rank& rank = ranks_[choice.rank];
  if (choice.kind == Kind::kDie) {
    rank.state = State::kDead;
    return;
  }
  rank.timed_out = choice.kind == Kind::kTimeOut;
  rank.state = State::kReady;
  running_ = choice.rank;
  if (_setjmp(scheduler_) == 0) {
    if (rank.begun) _longjmp(rank.jump, 1);
    rank.begun = true;
    setcontext(&rank.context);
  }
  running_ = -1;
  if (!failure_.empty()) fail(failure_);
}

inline std::vector<Explorer::Choice> Explorer::choices() const {
  std::vector<Choice> all, late;
  bool dead = false, pausing = false;
  for (int rank = 0; rank < program_.num_ranks; ++rank) {
    const State state = ranks_[rank].state;
    if (state == State::kReady) all.push_back({Kind::kRun, rank});
    if (state == State::kSleeping || state == State::kPausing) late.push_back({Kind::kTimeOut, rank});
    dead = dead || state == State::kDead;
    pausing = pausing || state == State::kPausing;
  }
  if (all.empty() && !late.empty()) {
    // Time-outs are for deaths, which ring no bell; everything else must be told.
    if (!dead && !pausing) fail("all ranks that have not ended sleep: a call to wake up was lost");
    all = late;
  }
  const int victim = program_.victim;
  if (victim >= 0 && !all.empty() && ranks_[victim].state < State::kEnded) all.push_back({Kind::kDie, victim});
  return all;
}

inline uint64_t Explorer::state() const {
  uint64_t sum = mix(words_, program_.more_state());
  for (const Rank& rank : ranks_) {
    sum = mix(sum, mix(rank.known, static_cast<uint64_t>(rank.state) * 4 + rank.relaxed * 2 + rank.timed_out));
  }
  return sum;
}

// Not inlined, so that what lies below its frame is only its own.
[[gnu::noinline]] inline void Explorer::give_up_control() {
  learned(2);  // it stands elsewhere than before
  Rank& rank = ranks_[running_];
  rank.stack_top = static_cast<char*>(__builtin_frame_address(0)) - kBelowFrame;
  if (_setjmp(rank.jump) == 0) _longjmp(scheduler_, 1);
}

inline void Explorer::fail(const std::string& why) const {
  std::string text = why + "\n  after:";
  for (const Step& step : path_) {
    const Choice& choice = step.choices[step.taken];
    text += choice.kind == Kind::kDie ? " dies:" : choice.kind == Kind::kTimeOut ? " times-out:" : " ";
    text += std::to_string(choice.rank);
  }
  throw std::runtime_error(text);
}

inline void Explorer::point() {
  ranks_[running_].relaxed = false;
  give_up_control();
}

inline void Explorer::access(bool relaxed) {
  Rank& rank = ranks_[running_];
  const bool goes_on = relaxed && (rank.relaxed || !program_.relaxed_too);
  rank.relaxed = relaxed;
  if (!goes_on) give_up_control();
}

inline void Explorer::learned(uint64_t value) {
  Rank& rank = ranks_[running_];
  rank.known = mix(rank.known, value);
  rank.last_read = value;
}

inline void Explorer::restart(uint64_t what) { ranks_[running_].known = mix(~uint64_t{0}, what); }

inline void Explorer::changed(const void* word, uint64_t before, uint64_t after) {
  learned(1);
  if (before == after) return;
  const auto place = reinterpret_cast<uintptr_t>(word);
  words_ += mix(place, after) - mix(place, before);
  for (Rank& rank : ranks_) {
    if (rank.state == State::kPausing) rank.state = State::kReady;
  }
}

inline void Explorer::sleep(const void* word) {
  Rank& rank = ranks_[running_];
  rank.word = word;
  rank.state = State::kSleeping;
  give_up_control();
  learned(rank.timed_out);
}

inline void Explorer::wake(const void* word) {
  for (Rank& rank : ranks_) {
    if (rank.state == State::kSleeping && rank.word == word) rank.state = State::kReady;
  }
}

inline bool Explorer::pause() {
  Rank& rank = ranks_[running_];
  rank.state = State::kPausing;
  give_up_control();
  learned(rank.timed_out);
  return !rank.timed_out;
}

inline bool Explorer::is_dead(int rank, bool or_has_ended) {
  if (rank != running_) access(false);
  const State state = ranks_[rank].state;
  const bool gone = state == State::kDead || (or_has_ended && state == State::kEnded);
  learned(gone);
  return gone;
}

}  // namespace torchtp::test
