#include "shm/group.h"

#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "core/deadline.h"
#include "core/format.h"
#include "shm/bell.h"
#include "shm/heap.h"
#include "shm/liveness.h"
#include "shm/ring.h"
#include "shm/segment.h"

namespace torchtp::shm {

namespace {

using std::chrono::milliseconds;

constexpr auto kYieldTime = std::chrono::milliseconds(1);
constexpr auto kFirstNap = std::chrono::milliseconds(2);
constexpr auto kLongestNap = std::chrono::milliseconds(50);

bool same(const Fingerprint& a, const Fingerprint& b) {
  return a.sequence == b.sequence && a.kind == b.kind && a.reduce_op == b.reduce_op && a.dtype == b.dtype &&
         a.flags == b.flags && a.root == b.root && a.count == b.count;
}

std::string in_numbers(const Fingerprint& f) {
  return cat("kind ", int{f.kind}, ", sequence ", f.sequence, ", reduce op ", int{f.reduce_op}, ", dtype ",
             int{f.dtype}, ", flags ", int{f.flags}, ", root ", f.root, ", count ", f.count);
}

std::string rank_list(uint64_t mask) {
  std::string text = (mask & (mask - 1)) == 0 ? "rank" : "ranks";
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if (mask >> rank & 1) text += cat(text.back() == 'k' || text.back() == 's' ? " " : ", ", rank);
  }
  return text;
}

// Spinning pays only while every rank has a core of its own.
int spins(int num_ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const bool known = sched_getaffinity(0, sizeof(cores), &cores) == 0;
  return known && CPU_COUNT(&cores) < num_ranks ? 20 : 300;
}

}  // namespace

// All ranks have announced this round.
class Group::Arrival final : public Awaited {
 public:
  explicit Arrival(const Group& group) : group_(group) {}

  bool ready() override {
    for (; next_ < group_.size_; ++next_) {
      if (!has_arrived(next_)) return false;
    }
    return true;
  }

  uint64_t missing() override {
    uint64_t mask = 0;
    for (int rank = 0; rank < group_.size_; ++rank) {
      if (!has_arrived(rank)) mask |= uint64_t{1} << rank;
    }
    return mask;
  }

  std::string describe() override {
    return cat("in round ", group_.round_, " (", group_.describe(announcement(group_.rank_).fingerprint), ")");
  }

 private:
  const Announcement& announcement(int rank) const {
    return group_.segment_->control().ranks[rank].announcements[group_.round_ & 1];
  }
  bool has_arrived(int rank) const { return announcement(rank).round.load() == group_.round_; }

  const Group& group_;
  int next_ = 0;
};

Group::Group(const Key&, GroupOptions options, int rank, int size, std::shared_ptr<Segment> segment,
             std::unique_ptr<Liveness> liveness)
    : options_(std::move(options)),
      rank_(rank),
      size_(size),
      process_(getpid()),
      spins_(spins(size)),
      segment_(std::move(segment)),
      liveness_(std::move(liveness)),
      heap_(std::make_unique<Heap>(segment_, rank)),
      timeout_ms_(options_.timeout.count()) {
  const SegmentSizes& sizes = segment_->sizes();
  options_.slot_bytes = sizes.slot_bytes;
  options_.heap_bytes = sizes.heap_bytes;
  options_.ring_bytes = sizes.ring_bytes;
  options_.mailbox_bytes = sizes.mailbox_bytes;
}

Group::~Group() { leave(); }

std::byte* Group::slot(int rank) const { return segment_->slot((round_ + 1) & 1, rank); }

const std::byte* Group::peer_slot(int rank) const { return segment_->slot(round_ & 1, rank); }

void Group::round(const Fingerprint& fingerprint, int64_t heap_offset) {
  check();
  ++round_;
  const int parity = round_ & 1;
  // Nobody reads this announcement any more: it was the one of two rounds ago, and all have come to the last round.
  Announcement& mine = segment_->control().ranks[rank_].announcements[parity];
  mine.fingerprint = fingerprint;
  mine.heap_offset = heap_offset;
  mine.round.store(round_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) notify(peer, Channel::kRound);
  }
  Arrival arrival(*this);
  wait(Channel::kRound, arrival);
  compare_fingerprints(parity);
}

// All ranks see the same announcements, so all find the same pair and throw the same words.
void Group::compare_fingerprints(int parity) {
  const Fingerprint& first = segment_->control().ranks[0].announcements[parity].fingerprint;
  for (int rank = 1; rank < size_; ++rank) {
    const Fingerprint& other = segment_->control().ranks[rank].announcements[parity].fingerprint;
    if (same(first, other)) continue;
    const std::string left = describe(first), right = describe(other);
    const bool telling = left != right;
    fail(cat("ranks disagree on what to do: rank 0 calls ", telling ? left : in_numbers(first), ", rank ", rank,
             " calls ", telling ? right : in_numbers(other)));
  }
}

std::string Group::describe(const Fingerprint& fingerprint) const {
  return options_.describe ? options_.describe(fingerprint) : in_numbers(fingerprint);
}

int64_t Group::peer_heap_offset(int rank) const {
  const int64_t offset = segment_->control().ranks[rank].announcements[round_ & 1].heap_offset;
  return offset >= 0 && static_cast<size_t>(offset) <= heap_bytes() ? offset : -1;
}

std::byte* Group::peer_heap(int rank, size_t num_bytes) const {
  const int64_t offset = peer_heap_offset(rank);
  if (offset < 0 || num_bytes > heap_bytes() - static_cast<size_t>(offset)) {
    throw Error(cat("rank ", rank, " announced no ", num_bytes, " bytes of its heap (offset ", offset, ")"));
  }
  return heap(rank) + offset;
}

std::byte* Group::heap(int rank) const { return segment_->heap(rank); }
bool Group::owns(const void* pointer, size_t num_bytes) const { return heap_->owns(pointer, num_bytes); }
size_t Group::allocated_bytes() const { return heap_->allocated_bytes(); }

// A forked child has a copy of the heap's books but the same memory: it must neither take nor give back any.
std::byte* Group::allocate(size_t num_bytes) {
  if (getpid() != process_) throw Error("a forked child cannot allocate from the shared heap of its parent's group");
  return heap_->allocate(num_bytes);
}

void Group::free(std::byte* pointer) {
  if (getpid() == process_) heap_->free(pointer);
}

int64_t Group::heap_offset(const void* pointer, size_t num_bytes) const {
  return owns(pointer, num_bytes) ? static_cast<const std::byte*>(pointer) - heap(rank_) : -1;
}

void Group::abort(const std::string& why) noexcept {
  Control& control = segment_->control();
  uint32_t expected = kRunning;
  if (!control.abort_state.compare_exchange_strong(expected, kWritingCause)) return;
  const size_t length = std::min(why.size(), kCauseBytes - 1);
  std::memcpy(control.cause, why.data(), length);
  control.cause[length] = 0;
  control.abort_state.store(kAborted);
  for (int peer = 0; peer < size_; ++peer) {
    for (Bell& bell : control.ranks[peer].bells) ring(bell);
  }
}

bool Group::aborted() const noexcept { return segment_->control().abort_state.load() != kRunning; }

void Group::check() const {
  if (!aborted()) return;
  const Control& control = segment_->control();
  // Whoever writes the cause may die over it: do not wait long.
  const Deadline patience{std::chrono::seconds(1)};
  while (control.abort_state.load() != kAborted && !patience.passed()) std::this_thread::yield();
  if (control.abort_state.load() != kAborted) throw Error(cat("torchtp group '", name(), "' was aborted"));
  throw Error(cat("torchtp group '", name(), "': ", std::string(control.cause, strnlen(control.cause, kCauseBytes))));
}

void Group::fail(const std::string& why) {
  abort(why);
  check();
  throw Error(why);
}

void Group::leave() noexcept {
  if (getpid() != process_) return;  // a forked child is not the rank
  Control& control = segment_->control();
  if (control.ranks[rank_].left.exchange(1) != 0) return;
  for (int peer = 0; peer < size_; ++peer) {
    for (Bell& bell : control.ranks[peer].bells) ring(bell);
  }
}

void Group::set_timeout(milliseconds timeout) { timeout_ms_ = timeout.count(); }
milliseconds Group::timeout() const { return milliseconds(timeout_ms_.load()); }

void Group::notify(int peer, Channel channel) const {
  ring(segment_->control().ranks[peer].bells[static_cast<int>(channel)]);
}

RingWriter Group::ring_to(int peer, Channel channel) const { return RingWriter(segment_, channel, rank_, peer); }
RingReader Group::ring_from(int peer, Channel channel) const { return RingReader(segment_, channel, peer, rank_); }

void Group::wait(Channel channel, Awaited& awaited) {
  for (int i = 0; i < spins_; ++i) {
    if (awaited.ready()) return;
    pause_briefly();
  }
  const milliseconds limit = timeout();
  const Deadline deadline(limit);
  const Deadline end_of_yielding(kYieldTime);
  do {
    if (awaited.ready()) return;
    check();
    sched_yield();
  } while (!end_of_yielding.passed());

  Bell& bell = segment_->control().ranks[rank_].bells[static_cast<int>(channel)];
  for (std::chrono::nanoseconds longest = kFirstNap;;
       longest = std::min<std::chrono::nanoseconds>(2 * longest, kLongestNap)) {
    Nap nap(bell);
    if (awaited.ready()) return;
    look_for_trouble(awaited);
    if (deadline.passed()) {
      fail(cat("timeout of ", limit.count(), " ms passed on rank ", rank_, " while it waited for ",
               rank_list(awaited.missing()), " ", awaited.describe()));
    }
    nap.sleep(std::min(longest, deadline.left()));
  }
}

void Group::look_for_trouble(Awaited& awaited) {
  check();
  const Control& control = segment_->control();
  uint64_t left = 0;
  for (int peer = 0; peer < size_; ++peer) {
    // In this order: who leaves says so before its process ends.
    const bool dead = liveness_->is_dead(peer);
    if (control.ranks[peer].left.load() != 0) {
      left |= uint64_t{1} << peer;
    } else if (dead) {
      fail(cat("rank ", peer, " died (its process is gone) while rank ", rank_, " waited ", awaited.describe()));
    }
  }
  if (left == 0 || awaited.ready()) return;
  if (awaited.is_hopeless(left)) {
    left &= awaited.missing();
    fail(cat(rank_list(left), " left the group while rank ", rank_, " waited ", awaited.describe()));
  }
}

}  // namespace torchtp::shm
