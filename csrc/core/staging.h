#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace torchtp {

// Chooses how to write what another core reads next: by ordinary stores, which first fetch the line, often from the
// very core that is about to read it, or past the caches (core/stream_copy.h). Which one is better by a factor of two
// to four is the affair of where the two cores are, which virtual machines do not tell truly and which changes: so both
// are timed now and then, as the copies come, and the faster one is kept. For one thread at a time.
//
// The way is chosen by who writes and paid for by who reads, too. Messages tell their ways, so that each rank can time
// what it costs to read either; it adds that to the cost of its own writes, as if its readers were like itself.
class Staging {
 public:
  static constexpr size_t kPieceBytes = size_t{128} << 10;  // of a message; each piece is written one way

  // How the pieces of a message are written. Travels with it; whatever it holds may be asked.
  struct Ways {
    uint32_t first_copy = 0;
    uint16_t num_trials = 0;  // so many pieces from the first are timed, and take turns
    uint16_t is_past = 0;     // the others

    bool is_trial(size_t offset) const { return offset / kPieceBytes < num_trials; }
    bool past(size_t offset) const;
  };

  enum class Side { kWrite, kRead };

  explicit Staging(bool past = !all_share_a_cache());  // what to begin with

  // All of it in one piece.
  void copy(std::byte* out, const std::byte* in, size_t num_bytes);

  Ways ways_of_message(size_t num_bytes);
  // The rest of `num_bytes`, of which `done` are copied, as far as it is one piece.
  static size_t piece_of_message(size_t num_bytes, size_t done);

  // One copy, from its making to its end, for who copies in his own way: as past() says.
  class Copy {
   public:
    Copy(Staging& staging, size_t num_bytes);
    // A piece of a message, or a part of one.
    Copy(Staging& staging, Side side, const Ways& ways, size_t offset, size_t num_bytes);
    ~Copy();
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;

    bool past() const { return past_; }
    void run(std::byte* out, const std::byte* in) const;

   private:
    Staging& staging_;
    const Side side_;
    const size_t num_bytes_;
    const bool past_;
    const int64_t began_ns_;  // 0: it is not timed
  };

  bool past() const { return past_; }
  void took(Side side, bool past, double ns_per_byte);  // a copy of a trial

 private:
  static constexpr size_t kSamples = 8;                // of each way in a trial
  static constexpr size_t kTrials = 2 * kSamples + 2;  // that many turns hold as many of each

  struct Samples {
    std::array<double, kSamples> ns_per_byte{};  // the last ones
    size_t count = 0;
  };

  static bool all_share_a_cache();  // as far as the system tells
  Ways ways_of_copies(size_t number);
  double cost(bool past) const;
  static double lower_quartile(Samples samples);

  bool past_;
  uint64_t copies_ = 0;  // large ones
  uint64_t next_trial_ = 0;
  std::array<Samples, 2> writes_;  // [past]
  std::array<Samples, 2> reads_;
};

}  // namespace torchtp
