#include "core/staging.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>

#include "core/clock.h"
#include "core/stream_copy.h"

namespace torchtp {

namespace {

// Smaller ones tell too little.
constexpr size_t kTimedBytes = size_t{16} << 10;

// So many reads of either way, at least, or they are left out of the account.
constexpr size_t kFewReads = 4;

// Trials are this many times as far apart each time, up to the last distance: nobody has read the first pieces of a
// ring before they are written, so the first trial may see neither way as it is. A trial takes 16 to 18 copies.
constexpr uint64_t kFurther = 4;
constexpr uint64_t kFurthest = 1024;

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The sequence of Thue and Morse: any stretch has about as many of both, and no period, so neither way always meets the
// first copy of a call.
bool takes_turn(uint64_t number) {
  bool odd = false;
  for (; number != 0; number &= number - 1) odd = !odd;
  return odd;
}

}  // namespace

bool Staging::Ways::past(size_t offset) const {
  return is_trial(offset) ? takes_turn(first_copy + offset / kPieceBytes) : is_past != 0;
}

Staging::Staging(bool past) : past_(past) {}

bool Staging::all_share_a_cache() {
  const std::string online = first_line("/sys/devices/system/cpu/online");
  return !online.empty() && online == first_line("/sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list");
}

Staging::Ways Staging::ways_of_copies(size_t number) {
  const uint64_t first = copies_ + 1;
  copies_ += number;
  const bool is_tried = kCanStream && copies_ >= next_trial_;
  return {static_cast<uint32_t>(first), static_cast<uint16_t>(is_tried ? std::min(number, kTrials) : 0), past_};
}

Staging::Ways Staging::ways_of_message(size_t num_bytes) {
  return ways_of_copies(num_bytes / kPieceBytes + (num_bytes % kPieceBytes >= kTimedBytes));
}

size_t Staging::piece_of_message(size_t num_bytes, size_t done) {
  return std::min(num_bytes - done, kPieceBytes - done % kPieceBytes);
}

void Staging::copy(std::byte* out, const std::byte* in, size_t num_bytes) { Copy(*this, num_bytes).run(out, in); }

Staging::Copy::Copy(Staging& staging, size_t num_bytes)
    : Copy(staging, Side::kWrite, staging.ways_of_copies(num_bytes >= kTimedBytes), 0, num_bytes) {}

Staging::Copy::Copy(Staging& staging, Side side, const Ways& ways, size_t offset, size_t num_bytes)
    : staging_(staging),
      side_(side),
      num_bytes_(num_bytes),
      past_(ways.past(offset) && num_bytes >= kStreamedBytes),
      began_ns_(ways.is_trial(offset) && num_bytes >= kTimedBytes ? now_ns() : 0) {}

Staging::Copy::~Copy() {
  if (began_ns_ == 0) return;
  staging_.took(side_, past_, static_cast<double>(now_ns() - began_ns_) / static_cast<double>(num_bytes_));
}

void Staging::Copy::run(std::byte* out, const std::byte* in) const {
  if (past_) {
    stream_copy(out, in, num_bytes_);
  } else if (num_bytes_ != 0) {  // of an empty message there may be no memory
    std::memcpy(out, in, num_bytes_);
  }
}

void Staging::took(Side side, bool past, double ns_per_byte) {
  Samples& samples = (side == Side::kWrite ? writes_ : reads_)[past];
  samples.ns_per_byte[samples.count++ % kSamples] = ns_per_byte;
  if (side == Side::kRead || std::min(writes_[0].count, writes_[1].count) < kSamples) return;
  past_ = cost(true) < cost(false);
  writes_ = reads_ = {};
  next_trial_ = copies_ + std::min(kFurthest, copies_ * kFurther);
}

double Staging::cost(bool past) const {
  const bool readers_tell = std::min(reads_[0].count, reads_[1].count) >= kFewReads;
  const double writes = lower_quartile(writes_[past]);
  if (readers_tell) return writes + lower_quartile(reads_[past]);
  // What was written past the caches comes from memory again, which costs as much; out of the other's cache, little.
  return past ? 2 * writes : writes;
}

// Of the faster ones, which nothing else on the machine has held up; not of the fastest, which luck may have had.
double Staging::lower_quartile(Samples samples) {
  const auto begin = samples.ns_per_byte.begin();
  const size_t count = std::min(samples.count, kSamples);
  std::nth_element(begin, begin + count / 4, begin + count);
  return begin[count / 4];
}

}  // namespace torchtp
