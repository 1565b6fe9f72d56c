#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "core/deadline.h"
#include "core/format.h"
#include "core/memory_left.h"

namespace torchtp::shm {

namespace {

// Looking at what is left takes some 50 us, as long as taking 1 MB does.
constexpr size_t kLookEvery = size_t{1} << 20;

constexpr char kOutOfMemory[] = " (is the machine or the container out of memory?)";

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

size_t pages(size_t num_bytes) { return (num_bytes + kPage - 1) / kPage * kPage; }

// Everybody's memory, most of it never touched, does not belong in the dump of one rank.
void keep_out_of_core_dumps(const Mapping& mapping) { madvise(mapping.data(), mapping.num_bytes(), MADV_DONTDUMP); }

// Ranks that take memory one after the other: side by side each would find enough for itself where there is too little
// for all. The kernel gives the turn back when a process ends. Who is stopped while it has the turn is not waited for.
class Turn {
 public:
  Turn(const Fd& file, std::mutex& threads) : file_(file), threads_(threads) {
    const Deadline deadline(std::chrono::seconds(10));
    while (!change(F_WRLCK) && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~Turn() { change(F_UNLCK); }
  Turn(const Turn&) = delete;

 private:
  bool change(short type) {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = kMaxRanks;  // the bytes before are those of the ranks (shm/liveness.h)
    lock.l_len = 1;
    return fcntl(file_.get(), F_SETLK, &lock) == 0;
  }

  const Fd& file_;
  std::lock_guard<std::mutex> threads_;
};

}  // namespace

Segment::Offsets::Offsets(const SegmentSizes& sizes) {
  const auto ranks = static_cast<size_t>(sizes.num_ranks);
  boards = pages(sizeof(Control));
  ring_controls = boards + pages(ranks * sizeof(Board));
  slots = ring_controls + pages(2 * ranks * ranks * sizeof(RingControl));
  rings = slots + 2 * ranks * sizes.slot_bytes;
  mailboxes = rings + ranks * ranks * sizes.ring_bytes;
  heaps = mailboxes + ranks * ranks * sizes.mailbox_bytes;
  end = heaps + ranks * sizes.heap_bytes;
}

Fd Segment::make_file(size_t num_bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && num_bytes > limit.rlim_cur) {
    throw Error(cat("a segment of ", num_bytes, " bytes is over this process' file size limit of ", limit.rlim_cur,
                    " bytes (ulimit -f): raise it, or set TORCHTP_HEAP_BYTES to less"));
  }
  Fd file = Fd::memory("torchtp");
  if (ftruncate(file.get(), static_cast<off_t>(num_bytes)) != 0) {
    throw_errno("cannot size a shared-memory segment to ", num_bytes, " bytes (set TORCHTP_HEAP_BYTES to less)");
  }
  if (fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) throw_errno("cannot seal a shared-memory segment");
  return file;
}

Segment::Segment(const SegmentSizes& sizes)
    : sizes_(sizes), offsets_(sizes), file_(make_file(offsets_.end)), mapping_(file_, offsets_.end) {
  keep_out_of_core_dumps(mapping_);
  reserve(mapping_.data(), offsets_.rings);
}

Segment::Segment(Fd file, const SegmentSizes& sizes)
    : sizes_(sizes), offsets_(sizes), file_(std::move(file)), mapping_(file_, offsets_.end) {
  keep_out_of_core_dumps(mapping_);
  struct stat status{};
  if (fstat(file_.get(), &status) != 0) throw_errno("cannot look at the shared-memory segment");
  const int seals = fcntl(file_.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || static_cast<size_t>(status.st_size) != offsets_.end) {
    throw Error(cat("rank 0 sent a segment of ", status.st_size, " bytes, expected a sealed one of ", offsets_.end,
                    " bytes: do all ranks run the same torchtp?"));
  }
  populate(mapping_.data(), offsets_.rings);
}

Control& Segment::control() const { return *reinterpret_cast<Control*>(mapping_.data()); }

Board& Segment::board(int rank) const { return reinterpret_cast<Board*>(mapping_.data() + offsets_.boards)[rank]; }

RingControl& Segment::ring_control(Channel channel, int from, int to) const {
  auto* const first = reinterpret_cast<RingControl*>(mapping_.data() + offsets_.ring_controls);
  const int64_t block = channel == Channel::kExchange ? 0 : 1;
  return first[(block * sizes_.num_ranks + from) * sizes_.num_ranks + to];
}

std::byte* Segment::ring(Channel channel, int from, int to) const {
  const size_t first = channel == Channel::kExchange ? offsets_.rings : offsets_.mailboxes;
  return mapping_.data() + first + (from * sizes_.num_ranks + to) * ring_bytes(channel);
}

size_t Segment::ring_bytes(Channel channel) const {
  return channel == Channel::kExchange ? sizes_.ring_bytes : sizes_.mailbox_bytes;
}

std::byte* Segment::slot(int parity, int rank) const {
  return mapping_.data() + offsets_.slots + (parity * sizes_.num_ranks + rank) * sizes_.slot_bytes;
}

std::byte* Segment::heap(int rank) const {
  return mapping_.data() + offsets_.heaps + static_cast<size_t>(rank) * sizes_.heap_bytes;
}

void Segment::reserve(const std::byte* begin, size_t num_bytes) const {
  if ((taken_unseen_ += num_bytes) < kLookEvery) return take(begin, num_bytes);
  taken_unseen_ = 0;
  // Ranks mostly take the same at the same time.
  if (lack_of_memory(num_bytes * static_cast<size_t>(sizes_.num_ranks)).empty()) return take(begin, num_bytes);
  const Turn turn(file_, taking_);
  if (const std::string lack = lack_of_memory(num_bytes); !lack.empty()) {
    throw OutOfMemory(cat("no memory for ", num_bytes, " bytes of shared memory: ", lack, kOutOfMemory));
  }
  take(begin, num_bytes);
}

// Kernels before 6.18 undo the whole call for any signal: where those of a timer come (a profiler), smaller and smaller
// pieces get through.
void Segment::take(const std::byte* begin, size_t num_bytes) const {
  int code = 0;
  size_t done = 0, most = num_bytes;
  while (done < num_bytes && (code == 0 || code == EINTR)) {
    const size_t piece = std::min(most, num_bytes - done);
    code = posix_fallocate(file_.get(), begin - mapping_.data() + done, static_cast<off_t>(piece));
    if (code == 0) done += piece;
    if (code == EINTR) most = std::max(most / 2, kPage);
  }
  if (code != 0 && done > 0) release(begin, done);
  if (code == EPERM || code == ENOSYS) {
    throw Error(cat("cannot take ", num_bytes, " bytes of shared memory: fallocate: ", std::strerror(code),
                    " (does the container's seccomp profile allow the call?)"));
  }
  if (code != 0) {
    throw Error(cat("no memory for ", num_bytes, " bytes of shared memory: ", std::strerror(code), kOutOfMemory));
  }
  populate(begin, num_bytes);
}

// Maps reserved pages at once, in this process: one by one, as they are first written, each costs a trap of a
// microsecond or two, 16 of them a halo of 64 KB. Older kernels cannot; then it is so.
void Segment::populate(const std::byte* begin, size_t num_bytes) const noexcept {
  constexpr int kPopulateWrite = 23;                                    // MADV_POPULATE_WRITE, since Linux 5.14
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));  // 64 KiB on some ARM hosts
  const size_t first = static_cast<size_t>(begin - mapping_.data()) / page * page;
  const size_t end = static_cast<size_t>(begin - mapping_.data()) + num_bytes;
  madvise(mapping_.data() + first, end - first, kPopulateWrite);
}

void Segment::release(const std::byte* begin, size_t num_bytes) const noexcept {
  const off_t offset = begin - mapping_.data();
  while (fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(num_bytes)) !=
             0 &&
         errno == EINTR) {
  }
}

}  // namespace torchtp::shm
