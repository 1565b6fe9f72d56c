#include "shm/group.h"

#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "core/clock.h"
#include "core/deadline.h"
#include "core/format.h"
#include "shm/heap.h"
#include "shm/liveness.h"
#include "shm/protocol.h"
#include "shm/ring.h"
#include "shm/segment.h"
#include "shm/stall.h"
#include "shm/whereabouts.h"

namespace torchtp::shm {

namespace {

using std::chrono::milliseconds;

constexpr auto kPatienceForCause = milliseconds(20);

bool same(const Fingerprint& a, const Fingerprint& b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

std::string in_numbers(const Fingerprint& f) {
  return cat("kind ", int{f.kind}, ", sequence ", f.sequence, ", reduce op ", int{f.reduce_op}, ", dtype ",
             int{f.dtype}, ", flags ", int{f.flags}, ", root ", f.root, ", count ", f.count);
}

// Others may have written anything there, and Python takes only text.
std::string printable(std::string text) {
  for (char& letter : text) {
    if (letter < ' ' || letter > '~') letter = letter == '\n' ? ' ' : '?';
  }
  return text;
}

// Spinning pays only while every rank has a core of its own: then some 25 us, as long as another rank mostly is late
// by. Who yields may come back after a whole slice of somebody else.
int spins(int num_ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const bool known = sched_getaffinity(0, sizeof(cores), &cores) == 0;
  return known && CPU_COUNT(&cores) < num_ranks ? 20 : 1000;
}

}  // namespace

// All ranks have announced this round.
class Group::Arrival final : public Awaited {
 public:
  explicit Arrival(Group& group) : group_(group) {}

  bool ready() override {
    for (; next_ < group_.size_; ++next_) {
      if (!has_arrived(next_)) return false;
    }
    return true;
  }

  uint64_t missing() override {
    uint64_t mask = 0;
    for (int rank = 0; rank < group_.size_; ++rank) {
      const uint64_t at = group_.protocol_->round_of(rank, group_.round_);
      if (at == group_.round_) continue;
      if (at + 2 != group_.round_ && (at != 0 || group_.round_ > 2)) {
        group_.fail(cat("the memory of the group is damaged: rank ", group_.called(rank), " stands in round ", at,
                        " while rank ", group_.called(group_.rank_), " is in round ", group_.round_));
      }
      mask |= uint64_t{1} << rank;
    }
    return mask;
  }

  std::string describe() override { return group_.describe(group_.fingerprint_, group_.label_); }

  std::string describe_peer(int rank) override {
    if (group_.round_ < 2) return "";
    // Overwritten only after that rank has come to our round.
    const Fingerprint last = group_.protocol_->announced(rank, group_.round_ - 1).fingerprint;
    if (has_arrived(rank)) return "";
    return last.kind == kMaking ? "has called nothing yet" : "last called " + group_.describe(last, "");
  }

 private:
  bool has_arrived(int rank) const { return group_.protocol_->has_arrived(rank, group_.round_); }

  Group& group_;
  int next_ = 0;
};

Group::Group(const Key&, GroupOptions options, int rank, int size, std::shared_ptr<Segment> segment,
             std::unique_ptr<Liveness> liveness, const std::vector<std::string>& processes)
    : options_(std::move(options)),
      rank_(rank),
      size_(size),
      process_(getpid()),
      spins_(spins(size)),
      segment_(std::move(segment)),
      liveness_(std::move(liveness)),
      protocol_(std::make_unique<Protocol<Processes>>(segment_->control(), rank, size)),
      heap_(std::make_unique<Heap>(segment_, rank)),
      timeout_ms_(options_.timeout.count()),
      round_timeout_ms_(options_.timeout.count()),
      announced_(size),
      arrivals_(size) {
  const SegmentSizes& sizes = segment_->sizes();
  options_.slot_bytes = sizes.slot_bytes;
  options_.heap_bytes = sizes.heap_bytes;
  options_.ring_bytes = sizes.ring_bytes;
  options_.mailbox_bytes = sizes.mailbox_bytes;
  if (options_.whereabouts) options_.whereabouts->add(*this, options_.name, processes, segment_->board(rank));
}

Group::~Group() {
  if (options_.whereabouts && !is_forked()) options_.whereabouts->remove(*this);
  leave();
}

std::byte* Group::slot(int rank) const { return segment_->slot((round_ + 1) & 1, rank); }

std::byte* Group::peer_slot(int rank) const { return segment_->slot(round_ & 1, rank); }

void Group::round(const Fingerprint& fingerprint, int64_t heap_offset) {
  check();
  ++round_;
  fingerprint_ = fingerprint;
  protocol_->announce(round_, {fingerprint, heap_offset, now_ns()});
  Arrival arrival(*this);
  wait(Channel::kRound, arrival);
  for (int rank = 0; rank < size_; ++rank) announced_[rank] = protocol_->announced(rank, round_);
  compare_fingerprints();
  if (fingerprint.sequence == arrived_at_) return;
  arrived_at_ = fingerprint.sequence;
  for (int rank = 0; rank < size_; ++rank) arrivals_[rank] = announced_[rank].arrived_ns;
}

// All ranks see the same announcements, so all find the same pair and throw the same words.
void Group::compare_fingerprints() {
  const Fingerprint& first = announced_[0].fingerprint;
  for (int rank = 1; rank < size_; ++rank) {
    const Fingerprint& other = announced_[rank].fingerprint;
    if (same(first, other)) continue;
    const std::string left = describe(first, ""), right = describe(other, "");
    const bool telling = left != right;
    fail(cat("ranks disagree on what to do: rank ", called(0), " calls ", telling ? left : in_numbers(first), ", rank ",
             called(rank), " calls ", telling ? right : in_numbers(other)));
  }
}

bool Group::runs(int rank) const {
  const auto process = liveness_->process(rank);
  return process && (process->state == 'R' || process->state == 'S');
}

// Nothing where the board is being written time and again.
std::vector<ToldWait> Group::waits_of(int rank) const {
  uint64_t words[kToldWords];
  int tries = 3;
  while (!read_board(segment_->board(rank), words)) {
    if (--tries == 0) return {};
  }
  ToldWaits told;
  std::memcpy(told.data(), words, sizeof(words));
  std::vector<ToldWait> sound;
  const int64_t now = now_ns();
  const uint64_t ranks = size_ == kMaxRanks ? ~uint64_t{0} : (uint64_t{1} << size_) - 1;
  for (ToldWait& wait : told) {
    if (wait.since_ns <= 0 || wait.since_ns > now || wait.failed_ns < 0) continue;
    for (char* const text : {wait.call, wait.missing}) {
      const size_t size = text == wait.call ? sizeof(wait.call) : sizeof(wait.missing);
      const std::string shown = printable(std::string(text, strnlen(text, size - 1)));
      text[shown.copy(text, size - 1)] = 0;
    }
    wait.for_ranks &= ranks;
    sound.push_back(wait);
  }
  return sound;
}

std::vector<int> Group::absent() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (protocol_->round_of(rank, round_) < round_) ranks.push_back(rank);
  }
  return ranks;
}

std::string Group::describe(const Fingerprint& fingerprint, const std::string& label) const {
  if (options_.describe) return options_.describe(fingerprint, label);
  return cat("call (", in_numbers(fingerprint), label.empty() ? "" : ", ", label, ")");
}

int64_t Group::peer_heap_offset(int rank) const {
  const int64_t offset = announced_[rank].heap_offset;
  return offset >= 0 && static_cast<size_t>(offset) <= heap_bytes() ? offset : -1;
}

std::byte* Group::peer_heap(int rank, size_t num_bytes) const {
  const int64_t offset = peer_heap_offset(rank);
  if (offset < 0 || num_bytes > heap_bytes() - static_cast<size_t>(offset)) {
    throw Error(cat("rank ", called(rank), " announced no ", num_bytes, " bytes of its heap (offset ", offset, ")"));
  }
  return heap(rank) + offset;
}

std::byte* Group::heap(int rank) const { return segment_->heap(rank); }
bool Group::owns(const void* pointer, size_t num_bytes) const { return heap_->owns(pointer, num_bytes); }
size_t Group::allocated_bytes() const { return heap_->allocated_bytes(); }

bool Group::is_forked() const { return getpid() != process_; }

// A forked child has a copy of the heap's books but the same memory: it must neither take nor give back any.
std::byte* Group::allocate(size_t num_bytes) {
  if (is_forked()) throw Error("a forked child cannot allocate from the shared heap of its parent's group");
  return heap_->allocate(num_bytes);
}

void Group::free(std::byte* pointer) {
  if (!is_forked()) heap_->free(pointer);
}

int64_t Group::heap_offset(const void* pointer, size_t num_bytes) const {
  return owns(pointer, num_bytes) ? static_cast<const std::byte*>(pointer) - heap(rank_) : -1;
}

void Group::abort(const std::string& why) noexcept { protocol_->abort(why); }
bool Group::aborted() const noexcept { return protocol_->abort_state() != kRunning; }

void Group::check() const {
  if (!aborted()) return;
  // Whoever writes the cause may die over it: do not wait long.
  const Deadline patience{kPatienceForCause};
  while (protocol_->abort_state() != kAborted && !patience.passed()) std::this_thread::yield();
  if (protocol_->abort_state() != kAborted) throw Error(cat("torchtp ", title(), " was aborted"));
  throw Error(cat("torchtp ", title(), ": ", printable(protocol_->cause())));
}

Presence Group::presence(int rank) const {
  const Gone gone = protocol_->gone([&](int peer) { return peer == rank && liveness_->is_dead(peer); });
  if ((gone.left >> rank & 1) != 0) return Presence::kLeft;
  return (gone.dead >> rank & 1) != 0 ? Presence::kDied : Presence::kThere;
}

void Group::fail(const std::string& why) {
  abort(why);
  check();
  throw Error(why);
}

void Group::leave(const std::string& why) noexcept {
  if (!is_forked()) protocol_->leave(why);
}

void Group::set_timeout(milliseconds timeout) {
  timeout_ms_ = timeout.count();
  set_round_timeout(timeout);
}
void Group::set_round_timeout(milliseconds timeout) { round_timeout_ms_ = timeout.count(); }
milliseconds Group::timeout() const { return milliseconds(timeout_ms_.load()); }
milliseconds Group::round_timeout() const { return milliseconds(round_timeout_ms_.load()); }

void Group::notify(int peer, Channel channel) const { ring(protocol_->bell(peer, channel)); }

RingWriter Group::ring_to(int peer, Channel channel) const { return RingWriter(segment_, channel, rank_, peer); }
RingReader Group::ring_from(int peer, Channel channel) const { return RingReader(segment_, channel, peer, rank_); }

}  // namespace torchtp::shm
