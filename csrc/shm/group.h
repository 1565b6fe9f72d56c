#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/staging.h"
#include "shm/bootstrap.h"

namespace torchtp::shm {

constexpr int kMaxRanks = 64;

struct ToldWait;
class Whereabouts;

// What a rank is about to do; compared on all ranks in every round. All fields must agree.
struct Fingerprint {
  uint64_t sequence = 0;
  uint8_t kind = 0;
  uint8_t reduce_op = 0;
  uint8_t dtype = 0;
  uint8_t flags = 0;
  int32_t root = -1;
  int64_t count = 0;
};

// Of the round with which making a group ends; other kinds are the caller's.
constexpr uint8_t kMaking = 255;

inline Fingerprint making() {
  Fingerprint print;
  print.sequence = ~uint64_t{0};  // of no call
  print.kind = kMaking;
  return print;
}

// How often a long wait lets the program handle signals.
constexpr std::chrono::milliseconds kBetweenSignals{100};

constexpr std::chrono::seconds kDefaultStall{10};

// What TORCHTP_STALL_SECONDS says, or kDefaultStall. Throws for what is no number of seconds.
std::chrono::milliseconds stall_from_environment();

// Rank 0's sizes count for all ranks; a timeout is each rank's own.
struct GroupOptions {
  size_t slot_bytes = size_t{512} << 10;  // rounded up to pages
  size_t heap_bytes = 0;  // address space of each rank's heap; 0: from TORCHTP_HEAP_BYTES or physical memory
  size_t ring_bytes = size_t{8} << 20;  // of each ordered pair in the exchange; memory is taken as it is used
  // The same for point-to-point messages. Through 2 MB a message of 1 MB takes 0.085 ms instead of 0.060.
  size_t mailbox_bytes = size_t{1} << 20;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // A wait that takes so long, or half its timeout, says once whom it waits for; 0: TORCHTP_STALL_SECONDS, or 10 s.
  std::chrono::milliseconds stall_after{0};
  // Ranks whose first threads have waited so long for one another in a circle, in different calls, fail: only other
  // threads of theirs could end that, which would have come.
  std::chrono::milliseconds deadlock_after = std::chrono::seconds(20);
  std::string name;         // in every error message
  std::string members;      // behind the name there, where that does not tell whose ranks are meant
  std::vector<int> called;  // what the ranks are called in messages; empty: as they are numbered
  // Words for messages, with the label of the call: "allreduce #7 (SUM, fp32, 1,024 elements, label)". Without it the
  // numbers are printed.
  std::function<std::string(const Fingerprint&, const std::string& label)> describe;
  std::function<void(const std::string&)> warn;  // takes reports of stalls; without it they go to stderr
  std::shared_ptr<Whereabouts> whereabouts;      // of this process; without it peers are not told where it waits
  // Called every kBetweenSignals by whoever waits long, on its thread, to let the program handle signals. What it
  // throws ends the wait, and with it the group: "rank 0 was interrupted by a signal (<what()>) while ...".
  std::function<void()> handle_signals;
};

// Independent conversations of one group; each may be held by another thread.
enum class Channel : int { kRound = 0, kExchange = 1, kMailbox = 2 };
constexpr int kNumChannels = 3;

// What a wait is for. ready() is called often and may make progress; the others only when something is wrong.
class Awaited {
 public:
  virtual ~Awaited() = default;
  virtual bool ready() = 0;
  virtual uint64_t missing() = 0;  // bit r: rank r has not done its part
  // Whether it cannot happen any more now that these ranks have left.
  virtual bool is_hopeless(uint64_t left) { return (left & missing()) != 0; }
  // Whether it can only happen once each of the missing ranks calls something. Asked again and again: as long as bytes
  // move it may happen without.
  virtual bool needs_all_missing() { return true; }
  virtual std::string describe() = 0;            // what is waited for: "allreduce #7 (...)"
  virtual std::string describe_peer(int rank) {  // what that rank does instead, if known: "last called ..."
    (void)rank;
    return "";
  }
};

struct Announced;
struct Processes;
template <typename World>
class Protocol;
class Segment;
class Heap;
class Liveness;
class Stall;
class RingReader;
class RingWriter;

enum class Presence { kThere, kLeft, kDied };  // kDied: the process has ended, and had not left

// Ranks of one host that share memory. One thread at a time per channel: round() is one conversation, the exchange and
// the mailbox are two more; allocate, free, owns, abort may be called by any thread at any time.
//
// After the first cause of an abort (a mismatch, a dead peer, a deadline, abort()) every call on every rank throws
// torchtp::Error with that cause. The memory stays mapped until the last shared_ptr goes.
class Group : public std::enable_shared_from_this<Group> {
 public:
  // Collective. When it fails on one rank it throws the same error on all that reached it.
  static std::shared_ptr<Group> create(Bootstrap& bootstrap, GroupOptions options);
  struct Key;
  Group(const Key&, GroupOptions options, int rank, int size, std::shared_ptr<Segment> segment,
        std::unique_ptr<Liveness> liveness, const std::vector<std::string>& processes);  // create() has the key
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::string title() const { return "group '" + options_.name + "'" + options_.members; }  // in messages
  size_t slot_bytes() const { return options_.slot_bytes; }
  size_t heap_bytes() const { return options_.heap_bytes; }

  // One round = one synchronisation of all ranks. A collective is a loop of {stage into slot(); round(); consume
  // peer_slot()}. Two sets of slots alternate, so that no second synchronisation is needed:
  //   slot(r)       staging memory of the round being prepared. Mine is slot(rank()); parts of another rank's slot may
  //                 be written too where the ranks agree who writes what.
  //   peer_slot(r)  what was staged for the last finished round; readable until this rank's next round() call. What one
  //                 rank alone reads there it may write, too; after the next round() that is in the owner's slot().
  // 64-byte aligned, slot_bytes() each.
  std::byte* slot(int rank) const;
  std::byte* peer_slot(int rank) const;

  // How to write into slots and heaps what other ranks read next; by the thread that calls round().
  Staging& staging() { return staging_; }

  // Announces my fingerprint (and where my buffer lies in my heap, or -1), waits until all ranks have announced theirs.
  // A mismatch is the same Error on every rank and names two ranks and both sides. Heap memory has no second copy: who
  // lets peers read or write its heap needs one more round before it touches that memory again.
  void round(const Fingerprint& fingerprint, int64_t heap_offset = -1);

  // The ranks that have not come to the round this rank came to last, for telling who is missing once round() has
  // thrown.
  std::vector<int> absent() const;

  // What `rank` announced in the last round: -1, or an offset inside its heap.
  int64_t peer_heap_offset(int rank) const;
  // The same as an address of num_bytes that surely lie in that heap; Error when they do not or nothing was announced.
  std::byte* peer_heap(int rank, size_t num_bytes) const;

  // When each rank came to the first round of the call (of the same sequence number) that the last round belongs to, in
  // nanoseconds of core/clock.h.
  const std::vector<int64_t>& arrivals() const { return arrivals_; }

  std::byte* heap(int rank) const;  // base of a rank's heap in my address space
  // From my own heap: 64-byte aligned (4 KiB from 64 KiB up), zero or old content, never nullptr; Error when full.
  std::byte* allocate(size_t num_bytes);
  void free(std::byte* pointer);
  bool owns(const void* pointer, size_t num_bytes) const;            // lies wholly in MY heap
  int64_t heap_offset(const void* pointer, size_t num_bytes) const;  // for round(): -1 when not owned
  size_t allocated_bytes() const;

  // Once for each call of this rank, on the thread that makes it: who calls by several may come to a call of the group
  // while its first one waits elsewhere.
  void note_caller();
  bool is_forked() const;  // whether this process is a child of the rank: it has the memory, but is not the rank

  // Frees all waiters on all ranks; the first cause wins. Never blocks, never throws.
  void abort(const std::string& why) noexcept;
  bool aborted() const noexcept;
  void check() const;  // throws the cause when aborted
  Presence presence(int rank) const;
  // The end: a peer that waits for this rank from now on gets an Error at once, which tells why if that is known.
  void leave(const std::string& why = "") noexcept;
  void set_timeout(std::chrono::milliseconds timeout);
  // Of rounds alone, until one of the two is set again: a call's own must not end messages and exchanges under way.
  void set_round_timeout(std::chrono::milliseconds timeout);
  // What the rounds from now on belong to, for messages of this rank; by the thread that calls round().
  void set_label(std::string label) { label_ = std::move(label); }
  std::chrono::milliseconds timeout() const;
  std::chrono::milliseconds round_timeout() const;

  int called(int rank) const { return options_.called.empty() ? rank : options_.called[rank]; }
  bool runs(int rank) const;  // as far as the kernel shows: not stopped, not waiting for a device
  std::vector<ToldWait> waits_of(int rank) const;
  const std::shared_ptr<Whereabouts>& whereabouts() const { return options_.whereabouts; }

  // For what is built on the group (exchange, mailbox).
  void wait(Channel channel, Awaited& awaited);  // Error on abort, deadline, dead or departed peers
  // One look at what nobody sits and waits for: the same Error as of a wait that has taken `waited`.
  void look_after(Awaited& awaited, std::chrono::nanoseconds waited);
  void notify(int peer, Channel channel) const;  // after a sequentially consistent store the peer may wait for
  RingWriter ring_to(int peer, Channel channel) const;
  RingReader ring_from(int peer, Channel channel) const;
  void handle_signals(const std::function<std::string()>& where);  // for waits elsewhere; see GroupOptions

 private:
  friend class FirstThreadWaits;
  friend class OutsideWait;
  class Arrival;

  void compare_fingerprints();
  std::string describe(const Fingerprint& fingerprint, const std::string& label) const;
  void look_for_trouble(Awaited& awaited);
  Stall begin_stall() const;
  std::string in_words_of_timeout(std::chrono::milliseconds limit) const;
  std::string farewells(uint64_t ranks) const;
  bool keeps_from_running(Awaited& awaited) const;
  bool is_blocked(Channel channel, Awaited& awaited) const;  // see ToldWait
  bool may_come_by_thread(uint64_t ranks) const;
  void nap_until_ready(Channel channel, Awaited& awaited);
  void report(const std::string& what) const;
  [[noreturn]] void fail(const std::string& why);  // aborts, throws the first cause

  GroupOptions options_;
  const int rank_;
  const int size_;
  const int process_;
  const int spins_;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Liveness> liveness_;
  std::unique_ptr<Protocol<Processes>> protocol_;
  std::unique_ptr<Heap> heap_;
  Staging staging_;
  std::atomic<uint32_t> crowded_waits_{0};  // for a rank on the same core
  std::atomic<bool> first_thread_waits_{false};
  std::atomic<int64_t> timeout_ms_, round_timeout_ms_;
  uint64_t round_ = 0;
  Fingerprint fingerprint_;  // mine of this round
  std::string label_;
  std::vector<Announced> announced_;         // by all ranks for the last round, read once from shared memory
  uint64_t arrived_at_ = making().sequence;  // the sequence number of arrivals_
  std::vector<int64_t> arrivals_;
};

// While it lives, the first thread of the process, if that has made it, waits for rounds of the group that another
// thread makes in turn.
class FirstThreadWaits {
 public:
  explicit FirstThreadWaits(std::shared_ptr<Group> group);
  ~FirstThreadWaits();
  FirstThreadWaits(const FirstThreadWaits&) = delete;
  FirstThreadWaits& operator=(const FirstThreadWaits&) = delete;

 private:
  const std::shared_ptr<Group> group_;  // null on another thread
};

}  // namespace torchtp::shm
