#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "core/deadline.h"
#include "core/format.h"
#include "shm/group.h"
#include "shm/handover.h"
#include "shm/heap.h"
#include "shm/introduction.h"
#include "shm/liveness.h"
#include "shm/segment.h"

namespace torchtp::shm {

namespace {

constexpr size_t kLeastHeapBytes = size_t{1} << 30;
constexpr size_t kMostHeapBytes = size_t{64} << 30;
constexpr int64_t kLargestPart = int64_t{1} << 40;  // 64 ranks of them, and rings for all pairs, fit 64 bits
constexpr auto kLongestCreation = std::chrono::minutes(1);

constexpr char kTrouble[] = "cannot take part in a shared-memory group";

// Of this process, in bytes; 0 where the kernel does not show it.
size_t address_space_taken() {
  size_t num_pages = 0;
  std::ifstream("/proc/self/statm") >> num_pages;
  return num_pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

size_t default_heap_bytes(int num_ranks) {
  if (const char* const text = std::getenv("TORCHTP_HEAP_BYTES")) {
    char* end = nullptr;
    const unsigned long long value = std::strtoull(text, &end, 10);
    if (*text == 0 || *end != 0 || value < kPage || value > kLargestPart) {
      throw Error(
          cat("TORCHTP_HEAP_BYTES must be a number of bytes from ", kPage, " to ", kLargestPart, ", not '", text, "'"));
    }
    return value;
  }
  const size_t physical = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t heap_bytes = std::clamp(physical / num_ranks, kLeastHeapBytes, kMostHeapBytes);
  for (const auto resource : {RLIMIT_AS, RLIMIT_FSIZE}) {
    rlimit limit{};
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
    size_t part = limit.rlim_cur / 8;
    if (resource == RLIMIT_AS) {  // other groups, and the program, want some too
      const size_t taken = address_space_taken();
      part = limit.rlim_cur > taken ? (limit.rlim_cur - taken) / 16 : 0;
    }
    heap_bytes = std::min<size_t>(heap_bytes, part / num_ranks);
  }
  return heap_bytes;
}

SegmentSizes sizes_of(const GroupOptions& options, int num_ranks) {
  const auto pages = [](size_t num_bytes) {
    return static_cast<int64_t>((std::max<size_t>(num_bytes, 1) + kPage - 1) / kPage * kPage);
  };
  SegmentSizes sizes;
  sizes.num_ranks = num_ranks;
  sizes.slot_bytes = pages(options.slot_bytes);
  sizes.ring_bytes = pages(options.ring_bytes);
  sizes.mailbox_bytes = pages(options.mailbox_bytes);
  sizes.heap_bytes = pages(options.heap_bytes ? options.heap_bytes : default_heap_bytes(num_ranks));
  return sizes;
}

std::string to_text(const SegmentSizes& s) {
  return cat(s.num_ranks, " ", s.slot_bytes, " ", s.ring_bytes, " ", s.mailbox_bytes, " ", s.heap_bytes, " ");
}

// The sizes; what is left in `text` is the address. Nothing of it is trusted: a size becomes a pointer.
SegmentSizes from_text(std::istringstream& text, int num_ranks) {
  SegmentSizes s;
  text >> s.num_ranks >> s.slot_bytes >> s.ring_bytes >> s.mailbox_bytes >> s.heap_bytes;
  bool sound = !text.fail() && s.num_ranks == num_ranks;
  for (const int64_t size : {s.slot_bytes, s.ring_bytes, s.mailbox_bytes, s.heap_bytes}) {
    sound = sound && size > 0 && size <= kLargestPart && size % static_cast<int64_t>(kPage) == 0;
  }
  if (!sound) throw Error("rank 0 offers a segment of impossible sizes: do all ranks run the same torchtp?");
  return s;
}

// Of a process that dies the socket is gone a little before it can be seen to have died.
std::optional<int> who_dies(const KnownProcesses& processes, int num_ranks) {
  for (const Deadline patience(std::chrono::seconds(1)); !patience.passed();) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (processes.has_died(rank)) return rank;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return std::nullopt;
}

// How rank 0 is reached. It may have died after it said its part of this step, or have gone, as it saw another one's
// death: then nobody waits for its word.
Receiver reach(const std::string& address, const KnownProcesses& processes, int num_ranks,
               const GroupOptions& options) {
  try {
    return Receiver(address);
  } catch (const Error&) {
    const std::optional<int> dead = who_dies(processes, num_ranks);
    if (!dead) throw;
    throw Error(cat("rank ", options.called.empty() ? *dead : options.called[*dead],
                    " died (its process is gone) while the group was being made"));
  }
}

}  // namespace

std::chrono::milliseconds stall_from_environment() {
  const char* const text = std::getenv("TORCHTP_STALL_SECONDS");
  if (!text) return kDefaultStall;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*text == 0 || *end != 0 || !(seconds > 0 && seconds < 1e9)) {
    throw Error(cat("TORCHTP_STALL_SECONDS must be a positive number of seconds, not '", text, "'"));
  }
  return std::chrono::milliseconds(std::max<int64_t>(1, static_cast<int64_t>(1000 * seconds)));
}

struct Group::Key {};

std::shared_ptr<Group> Group::create(Bootstrap& bootstrap, GroupOptions options) {
  const int rank = bootstrap.rank(), size = bootstrap.size();
  std::shared_ptr<Segment> segment;
  std::optional<Handover> handover;
  const auto processes =
      std::make_shared<KnownProcesses>(processes_of(together(bootstrap, kTrouble, introduction)), rank);
  // From when all have come.
  const Deadline deadline(std::min<std::chrono::milliseconds>(options.timeout, kLongestCreation));
  bootstrap.watch([processes](int peer) { return processes->has_died(peer); });
  const std::vector<std::string> offers = together(bootstrap, kTrouble, [&] {
    if (size < 1 || size > kMaxRanks) throw Error(cat("it has ", size, " ranks, at most ", kMaxRanks, " are possible"));
    if (options.stall_after.count() == 0) options.stall_after = stall_from_environment();
    if (rank != 0) return std::string();
    segment = std::make_shared<Segment>(sizes_of(options, size));
    handover.emplace();
    return to_text(segment->sizes()) + handover->address();
  });

  if (auto shared = std::static_pointer_cast<Segment>(bootstrap.share(segment))) {
    segment = shared;
  } else {
    std::istringstream offer(offers[0]);
    SegmentSizes sizes;
    std::optional<Receiver> receiver;
    together(bootstrap, kTrouble, [&] {
      std::string address;
      sizes = from_text(offer, size);
      offer >> address;
      if (rank != 0) receiver.emplace(reach(address, *processes, size, options));
      return std::string();
    });
    together(bootstrap, kTrouble, [&] {
      if (rank == 0) {
        handover->serve(segment->file(), size - 1, deadline);
      } else {
        segment = std::make_shared<Segment>(receiver->receive(deadline), sizes);
      }
      return std::string();
    });
  }
  handover.reset();

  std::unique_ptr<Liveness> liveness;
  together(bootstrap, kTrouble, [&] {
    liveness = std::make_unique<Liveness>(segment->file(), rank, processes->said());
    return std::string();
  });
  std::shared_ptr<Group> group;
  try {
    const auto seen = together(bootstrap, kTrouble, [&] {
      const bool sees_all = liveness->watch();
      group = std::make_shared<Group>(Key{}, std::move(options), rank, size, std::move(segment), std::move(liveness),
                                      processes->said());
      return std::string(sees_all ? "" : "blind");
    });
    // Who takes part once more was alive when its lock could not be seen: locks do not show here.
    if (std::any_of(seen.begin(), seen.end(), [](const std::string& text) { return !text.empty(); })) {
      together(bootstrap, kTrouble, [] { return std::string(); });
    }
  } catch (const std::exception& error) {
    if (!group) throw;
    group->fail(error.what());  // the others may be in the last round already: one of them may know better
  }
  // Without the bootstrap: nobody goes on, and maybe ends with the store that it serves, before all are done with that.
  group->round(making());
  return group;
}

}  // namespace torchtp::shm
