#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace torchtp {

// Chooses how to write what another core reads next: by ordinary stores, which first fetch the line, often from the
// very core that is about to read it, or past the caches (core/stream_copy.h). Which one is better by a factor of two
// to four is the affair of where the two cores are, which virtual machines do not tell truly and which changes: so both
// are timed now and then, as the copies come, and the faster one is kept. For one thread at a time.
class Staging {
 public:
  explicit Staging(bool past = !all_share_a_cache());  // what to begin with

  void copy(std::byte* out, const std::byte* in, size_t num_bytes);

  // One copy, from its making to its end, for who copies in his own way: as past() says.
  class Copy {
   public:
    Copy(Staging& staging, size_t num_bytes);
    ~Copy();
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;

    bool past() const { return past_; }

   private:
    Staging& staging_;
    const size_t num_bytes_;
    bool past_;
    int64_t began_ns_ = 0;  // 0: it is not timed
  };

  bool past() const { return past_; }
  void took(bool past, double ns_per_byte);  // a copy of a trial

 private:
  static bool all_share_a_cache();       // as far as the system tells
  static constexpr size_t kSamples = 8;  // of each way in a trial

  bool past_;
  uint64_t copies_ = 0;  // large ones
  uint64_t next_trial_ = 0;
  std::array<std::array<double, kSamples>, 2> ns_per_byte_{};  // [past][sample]
  std::array<size_t, 2> num_samples_{};
};

}  // namespace torchtp
