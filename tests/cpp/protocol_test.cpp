// The protocol of a group (csrc/shm/protocol.h) in every order in which three ranks can come to its words; and, to know
// that this finds anything, protocols with one mistake each.
#include "shm/protocol.h"

#include <memory>
#include <optional>

#include "check.h"
#include "explorer.h"
#include "model.h"

using namespace torchtp::shm;
using torchtp::test::Explorer;
using torchtp::test::mix;
using torchtp::test::Model;

namespace {

constexpr int kRanks = 3;

enum class Mistake {
  kNone,
  kRingsFirst,       // and announces afterwards
  kNapsUnseen,       // looks, then says that it sleeps
  kOneAnnouncement,  // for even and odd rounds
  kOneSlot,
  kLooksForLeaversFirst,  // and for the dead afterwards
  kEveryCauseWins,
  kLeavesInSilence,
};

struct Case {
  int num_rounds = 2;
  int relaxed_too = 0;  // accesses to what is announced are told apart from those beside them
  bool leave = false;   // all leave at their end
  int victim = -1;
  int aborts = -1;  // this rank, beside its rounds
  int aborts_too = -1;
  int disagrees = -1;     // this rank announces something else in the last round
  int leaves_early = -1;  // this rank leaves before the last round
  Mistake mistake = Mistake::kNone;
};

// Thrown by a rank that stops; holds no memory.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "stopped"; }
};

// What shm::Group does, on words of the model.
class Team {
 public:
  explicit Team(const Case& c) : case_(c) {
    if (!troubled()) control_.abort_state.set_writer(Model::kNobody);
    for (int rank = 0; rank < kRanks; ++rank) {
      RankControlOf<Model>& own = control_.ranks[rank];
      own.left.set_writer(case_.leave ? rank : Model::kNobody);
      own.bells[static_cast<int>(Channel::kRound)].sleepers.set_writer(rank);
      for (auto& bell : own.bells) bell.rung.set_counter();
      for (auto& announcement : own.announcements) announcement.round.set_writer(rank);
    }
  }

  uint64_t explore() {
    Explorer::Program program;
    program.num_ranks = kRanks;
    program.victim = case_.victim;
    program.memory = {{&control_, offsetof(ControlOf<Model>, ranks) + kRanks * sizeof(RankControlOf<Model>)},
                      {&slots_, sizeof(slots_)},
                      {&ends_, sizeof(ends_)},
                      {&naps_, sizeof(naps_)}};
    program.run = [this](int rank) { run(rank); };
    program.check_the_end = [this] { check_the_end(); };
    program.more_state = [this] { return rings_missed(); };
    program.relaxed_too = case_.relaxed_too != 0;
    return Explorer(program).explore();
  }

 private:
  struct End {
    int rounds = 0;
    bool stopped = false;
    char cause = 0;  // 0: nobody told one
  };

  void run(int rank) {
    Protocol<Model> protocol(control_, rank, kRanks);
    try {
      for (int round = 1; round <= case_.num_rounds; ++round) {
        Explorer::current().restart(round);
        if (rank == case_.leaves_early && round == case_.num_rounds) break;
        if ((rank == case_.aborts || rank == case_.aborts_too) && round == case_.num_rounds) {
          fail(protocol, rank, static_cast<char>('a' + rank));
        }
        do_round(protocol, rank, round);
        ends_[rank].rounds = round;
      }
    } catch (const Stopped&) {
      ends_[rank].stopped = true;
    }
    Explorer::current().throws(false);
    naps_[rank].reset();
    Explorer::current().restart(mix(ends_[rank].rounds, ends_[rank].stopped * 1000 + ends_[rank].cause));
    if (!case_.leave) return;
    if (case_.mistake == Mistake::kLeavesInSilence) {
      control_.ranks[rank].left.store(1);
    } else {
      protocol.leave("");
    }
  }

  bool troubled() const {
    return case_.victim >= 0 || case_.aborts >= 0 || case_.disagrees >= 0 || case_.leaves_early >= 0;
  }

  // Whether each bell was rung since its rank looked at it: then a nap ends at once.
  uint64_t rings_missed() const {
    uint64_t all = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      const uint64_t rung = control_.ranks[rank].bells[static_cast<int>(Channel::kRound)].rung.peek();
      all = mix(all, naps_[rank] ? rung != *naps_[rank] : 2);
    }
    return all;
  }

  void do_round(Protocol<Model>& protocol, int rank, int round) {
    check(protocol, rank);
    const int slot = case_.mistake == Mistake::kOneSlot ? 0 : round & 1;
    slots_[slot][rank] = round;
    const bool differs = rank == case_.disagrees && round == case_.num_rounds;
    Announced mine;
    mine.fingerprint.sequence = 10 * round + differs;
    mine.heap_offset = round;
    mine.arrived_ns = rank;
    announce(protocol, rank, round, mine);
    wait(protocol, rank, round);
    bool same = true;
    for (int peer = 0; peer < kRanks; ++peer) {
      const Announced theirs = protocol.announced(peer, at(round));
      const bool differ = peer == case_.disagrees && round == case_.num_rounds;
      CHECK(theirs.fingerprint.sequence == uint64_t(10 * round + differ) && theirs.heap_offset == round &&
            theirs.arrived_ns == peer);
      same = same && theirs.fingerprint.sequence == uint64_t(10 * round);
    }
    if (!same) fail(protocol, rank, 'm');
    if (case_.relaxed_too != 0) Explorer::current().point();
    for (int peer = 0; peer < kRanks; ++peer) CHECK(slots_[slot][peer] == round);
  }

  uint64_t at(int round) const { return case_.mistake == Mistake::kOneAnnouncement ? 2 * round : round; }

  void announce(Protocol<Model>& protocol, int rank, int round, const Announced& mine) {
    if (case_.mistake != Mistake::kRingsFirst) return protocol.announce(at(round), mine);
    for (int peer = 0; peer < kRanks; ++peer) ring(protocol.bell(peer, Channel::kRound));
    AnnouncementOf<Model>& place = control_.ranks[rank].announcements[round & 1];
    place.fingerprint[0].store(mine.fingerprint.sequence, std::memory_order_relaxed);
    place.heap_offset.store(mine.heap_offset, std::memory_order_relaxed);
    place.arrived_ns.store(mine.arrived_ns, std::memory_order_relaxed);
    place.round.store(round);
  }

  void wait(Protocol<Model>& protocol, int rank, int round) {
    int next = 0;
    const auto ready = [&] {
      while (next < kRanks && protocol.has_arrived(next, at(round))) ++next;
      return next == kRanks;
    };
    // What is known from here on: besides `next`, what the nap has read of its bell.
    const auto first_look = [&] {
      naps_[rank] = Explorer::current().last_read();
      Explorer::current().restart(mix(round, next));
      return ready();
    };
    const auto look = [&] {
      const uint64_t known = Explorer::current().known();
      look_for_trouble(protocol, rank, round, ready);
      Explorer::current().restart(mix(known, next));  // it found nothing
      return std::chrono::nanoseconds(0);
    };
    if (case_.mistake == Mistake::kNapsUnseen) {
      while (!ready()) {
        Nap<Model> nap(protocol.bell(rank, Channel::kRound));
        nap.sleep(look());
      }
    } else {
      protocol.sleep_until(Channel::kRound, first_look, look);
    }
    naps_[rank].reset();
    Explorer::current().restart(mix(round, kRanks + 1));
  }

  template <typename Ready>
  void look_for_trouble(Protocol<Model>& protocol, int rank, int round, Ready&& ready) {
    check(protocol, rank);
    Gone gone = look_for_gone(protocol);
    if (gone.dead != 0) fail(protocol, rank, 'd');
    if (gone.left == 0 || ready()) return;
    for (int peer = 0; peer < kRanks; ++peer) {
      if ((gone.left >> peer & 1) != 0 && !protocol.has_arrived(peer, at(round))) fail(protocol, rank, 'l');
    }
  }

  Gone look_for_gone(Protocol<Model>& protocol) {
    const bool may_be = case_.victim >= 0 || case_.leave;
    const auto is_dead = [this, may_be](int peer) { return may_be && Explorer::current().is_dead(peer, case_.leave); };
    if (case_.mistake != Mistake::kLooksForLeaversFirst) return protocol.gone(is_dead);
    Gone gone;
    for (int peer = 0; peer < kRanks; ++peer) {
      const bool left = control_.ranks[peer].left.load() != 0;
      (left ? gone.left : gone.dead) |= uint64_t{left || is_dead(peer)} << peer;
    }
    return gone;
  }

  // Group::check: whoever writes the cause may die over it.
  void check(Protocol<Model>& protocol, int rank) {
    if (protocol.abort_state() == kRunning) return;
    while (protocol.abort_state() == kWritingCause && Explorer::current().pause()) {
    }
    if (protocol.abort_state() == kAborted) ends_[rank].cause = control_.cause[0];
    stop();
  }

  [[noreturn]] void fail(Protocol<Model>& protocol, int rank, char cause) {
    if (case_.mistake == Mistake::kEveryCauseWins) control_.abort_state.store(kRunning);
    protocol.abort(std::string(1, cause));
    check(protocol, rank);
    stop();
  }

  [[noreturn]] void stop() {
    Explorer::current().throws(true);
    throw Stopped();
  }

  void check_the_end() {
    const Explorer& explorer = Explorer::current();
    char cause = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      const End& end = ends_[rank];
      if (explorer.has_died(rank)) continue;
      CHECK(end.stopped || end.rounds == case_.num_rounds || rank == case_.leaves_early);
      CHECK(!end.stopped || troubled());
      if (case_.disagrees >= 0) CHECK(end.stopped);
      if (case_.leaves_early >= 0 && rank != case_.leaves_early) CHECK(end.stopped && end.cause == 'l');
      if (case_.aborts >= 0 && case_.victim < 0)
        CHECK(end.stopped && (end.cause == 'a' + case_.aborts || end.cause == 'a' + case_.aborts_too));
      if (!end.stopped) continue;
      // Without a cause only where the one who wrote it died over it.
      CHECK(end.cause != 0 || case_.victim >= 0);
      CHECK(end.cause != 'd' || explorer.has_died(case_.victim));
      CHECK(cause == 0 || cause == end.cause);
      cause = end.cause;
    }
  }

  const Case case_;
  ControlOf<Model> control_{};
  int slots_[2][kRanks] = {};
  End ends_[kRanks];
  std::optional<uint64_t> naps_[kRanks];  // what its bell had rung when the rank said that it sleeps
};

enum class BoardMistake { kNone, kNeverOdd, kLooksOnce };

// One rank writes twice, two read meanwhile: what they read is of one writing, or they know that it is not.
uint64_t explore_board(BoardMistake mistake) {
  BoardOf<Model, 2> board{};
  const auto write = [&](uint64_t version) {
    if (mistake != BoardMistake::kNeverOdd) return write_board(board, {version, version});
    for (auto& word : board.words) word.store(version, std::memory_order_release);
    board.changes.fetch_add(2);
  };
  const auto read = [&](uint64_t (&words)[2]) {
    if (mistake != BoardMistake::kLooksOnce) return read_board(board, words);
    const bool even = board.changes.load() % 2 == 0;
    for (int i = 0; i < 2; ++i) words[i] = board.words[i].load(std::memory_order_acquire);
    return even;
  };
  Explorer::Program program;
  program.num_ranks = kRanks;
  program.memory = {{&board, sizeof(board)}};
  program.run = [&](int rank) {
    for (uint64_t version = 1; version <= 2; ++version) {
      if (rank == 0) {
        write(version);
      } else {
        uint64_t words[2];
        if (read(words)) CHECK(words[0] == words[1]);
      }
    }
  };
  program.check_the_end = [] {};
  return Explorer(program).explore();
}

void holds(const Case& c) {
  const uint64_t num_states = std::make_unique<Team>(c)->explore();
  std::printf("%llu states\n", static_cast<unsigned long long>(num_states));
  CHECK(num_states > 10000);
}

void is_found(Mistake mistake, Case c, const std::string& part) {
  c.mistake = mistake;
  CHECK_THROWS(std::make_unique<Team>(c)->explore(), part);
}

Case with(std::initializer_list<std::pair<int Case::*, int>> values, bool leave = false) {
  Case c;
  for (const auto& [member, value] : values) c.*member = value;
  c.leave = leave;
  return c;
}

}  // namespace

int main() {
  const Case leaving = with({{&Case::num_rounds, 1}}, true);
  const Case early = with({{&Case::leaves_early, 0}, {&Case::num_rounds, 1}}, true);
  const Case two_causes = with({{&Case::aborts, 0}, {&Case::aborts_too, 2}, {&Case::num_rounds, 1}});
  return torchtp::test::run({
      {"rounds", [] { holds({}); }},
      {"a round, word by word", [] { holds(with({{&Case::num_rounds, 1}, {&Case::relaxed_too, 1}})); }},
      {"all leave", [&] { holds(leaving); }},
      {"a rank leaves early", [&] { holds(early); }},
      {"a rank dies", [] { holds(with({{&Case::victim, 2}, {&Case::num_rounds, 1}})); }},
      {"a rank aborts", [] { holds(with({{&Case::aborts, 1}, {&Case::num_rounds, 1}})); }},
      {"two ranks abort", [&] { holds(two_causes); }},
      {"a rank dies while it aborts",
       [] { holds(with({{&Case::victim, 1}, {&Case::aborts, 1}, {&Case::num_rounds, 1}})); }},
      {"a rank disagrees", [] { holds(with({{&Case::disagrees, 1}, {&Case::num_rounds, 1}})); }},
      {"a board", [] { CHECK(explore_board(BoardMistake::kNone) > 1000); }},
      {"mistake: never odd", [] { CHECK_THROWS(explore_board(BoardMistake::kNeverOdd), "words[0] == words[1]"); }},
      {"mistake: looks once", [] { CHECK_THROWS(explore_board(BoardMistake::kLooksOnce), "words[0] == words[1]"); }},
      {"mistake: rings first", [] { is_found(Mistake::kRingsFirst, {}, "wake up was lost"); }},
      {"mistake: naps unseen", [] { is_found(Mistake::kNapsUnseen, {}, "wake up was lost"); }},
      {"mistake: one announcement", [] { is_found(Mistake::kOneAnnouncement, {}, "after:"); }},
      {"mistake: one slot", [] { is_found(Mistake::kOneSlot, {}, "slots_[slot][peer] == round"); }},
      {"mistake: leavers first", [&] { is_found(Mistake::kLooksForLeaversFirst, leaving, "after:"); }},
      {"mistake: every cause wins", [&] { is_found(Mistake::kEveryCauseWins, two_causes, "after:"); }},
      {"mistake: leaves in silence", [&] { is_found(Mistake::kLeavesInSilence, early, "wake up was lost"); }},
  });
}
