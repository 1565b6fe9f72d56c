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

// Trials are this many times as far apart each time, up to the last distance: nobody has read the first pieces of a
// ring before they are written, so the first trial may see neither way as it is. A trial takes 16 copies.
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

// Of the faster ones, which nothing else on the machine has held up; not of the fastest, which luck may have had.
template <typename Samples>
double lower_quartile(Samples samples) {
  const auto quartile = samples.begin() + samples.size() / 4;
  std::nth_element(samples.begin(), quartile, samples.end());
  return *quartile;
}

}  // namespace

Staging::Staging(bool past) : past_(past) {}

bool Staging::all_share_a_cache() {
  const std::string online = first_line("/sys/devices/system/cpu/online");
  return !online.empty() && online == first_line("/sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list");
}

void Staging::copy(std::byte* out, const std::byte* in, size_t num_bytes) {
  const Copy way(*this, num_bytes);
  if (way.past()) {
    stream_copy(out, in, num_bytes);
  } else if (num_bytes != 0) {  // of an empty message there may be no memory
    std::memcpy(out, in, num_bytes);
  }
}

Staging::Copy::Copy(Staging& staging, size_t num_bytes)
    : staging_(staging), num_bytes_(num_bytes), past_(staging.past_ && num_bytes >= kStreamedBytes) {
  if (!kCanStream || num_bytes < kTimedBytes || ++staging_.copies_ < staging_.next_trial_) return;
  past_ = takes_turn(staging_.copies_);
  began_ns_ = now_ns();
}

Staging::Copy::~Copy() {
  if (began_ns_ != 0) {
    staging_.took(past_, static_cast<double>(now_ns() - began_ns_) / static_cast<double>(num_bytes_));
  }
}

void Staging::took(bool past, double ns_per_byte) {
  if (num_samples_[past] < kSamples) ns_per_byte_[past][num_samples_[past]++] = ns_per_byte;
  if (std::min(num_samples_[0], num_samples_[1]) < kSamples) return;
  past_ = lower_quartile(ns_per_byte_[1]) < lower_quartile(ns_per_byte_[0]);
  num_samples_ = {};
  next_trial_ = copies_ + std::min(kFurthest, copies_ * kFurther);
}

}  // namespace torchtp
