#include "collectives/reduce_rounds.h"

#include <vector>

namespace torchtp::collectives {

namespace {

// Up to here a copy into the slot costs less than the second round that reading a heap needs.
constexpr size_t kTinyBytes = 8 * 1024;

struct Range {
  size_t begin, end;  // bytes
  size_t size() const { return end - begin; }
};

// The r-th of `size` shares of num_bytes, cut at cache lines.
Range share_of(int rank, int size, size_t num_bytes) {
  const size_t lines = (num_bytes + kAlignment - 1) / kAlignment;
  const size_t per_rank = (lines + size - 1) / size * kAlignment;
  const size_t begin = std::min(rank * per_rank, num_bytes);
  return {begin, std::min(begin + per_rank, num_bytes)};
}

class Reduction {
 public:
  Reduction(const Call& call, const shm::Fingerprint& print, std::byte* data, int64_t count, c10::ScalarType dtype,
            ReduceOp op, int root)
      : group_(call.group),
        print_(print),
        data_(data),
        item_bytes_(c10::elementSize(dtype)),
        num_bytes_(count * item_bytes_),
        dtype_(dtype),
        op_(op),
        root_(root),
        rank_(group_.rank()),
        size_(group_.size()),
        wanted_(root == kEveryRank || root == rank_),
        inputs_(size_) {}

  void run() {
    if (num_bytes_ <= std::min(kSmallBytes, group_.slot_bytes())) return run_small();
    group_.round(print_, group_.heap_offset(data_, num_bytes_));
    if (all_in_heap(group_)) {
      run_in_heap();
    } else {
      run_staged();
    }
  }

 private:
  void run_small() {
    const int64_t heap_offset = num_bytes_ > kTinyBytes ? group_.heap_offset(data_, num_bytes_) : -1;
    if (heap_offset < 0) stage_bytes(group_, group_.slot(rank_), data_, num_bytes_);
    group_.round(print_, heap_offset);
    if (all_in_heap(group_)) return run_in_heap();
    if (any_in_heap()) {  // not all: the others cannot be read where they lie, so everybody stages
      stage_bytes(group_, group_.slot(rank_), data_, num_bytes_);
      group_.round(print_);
    }
    if (!wanted_) return;
    for (int r = 0; r < size_; ++r) inputs_[r] = r == rank_ ? data_ : group_.peer_slot(r);
    reduce(data_, num_bytes_);
    if (size_ == 2) claim_of_peers(group_, 0, num_bytes_);
  }

  bool any_in_heap() const {
    for (int r = 0; r < size_; ++r) {
      if (group_.peer_heap_offset(r) >= 0) return true;
    }
    return false;
  }

  void run_in_heap() {
    std::vector<std::byte*> buffers(size_);
    for (int r = 0; r < size_; ++r) buffers[r] = group_.peer_heap(r, num_bytes_);
    const Range share = share_of(rank_, size_, num_bytes_);
    // Written to all ranks at once, 25 MB on two ranks take 0.9 of the time that copies of blocks would take, 4 MB 0.7.
    std::vector<std::byte*> outputs;
    for (int r = 0; r < size_; ++r) {
      inputs_[r] = buffers[r] + share.begin;
      if (root_ == kEveryRank || root_ == r) outputs.push_back(buffers[r] + share.begin);
    }
    reduce(Outputs(outputs), share.size());
    group_.round(print_);
  }

  // Each rank reduces its share of a chunk where it lies in the slots, and the results go into the output and back into
  // the slots, from where their owners take them after the next round: one synchronisation a chunk.
  void run_staged() {
    const size_t chunk_bytes = align_down(group_.slot_bytes());
    const size_t num_chunks = (num_bytes_ + chunk_bytes - 1) / chunk_bytes;
    const auto chunk = [&](size_t c) { return Range{c * chunk_bytes, std::min((c + 1) * chunk_bytes, num_bytes_)}; };
    for (size_t c = 0; c <= num_chunks; ++c) {
      if (c < num_chunks) stage_for_others(chunk(c));
      group_.round(print_);
      if (c > 0 && wanted_) take_shares(chunk(c - 1));
      if (c < num_chunks) reduce_share(chunk(c));
    }
  }

  // All of the chunk but my share: nobody else reads that one.
  void stage_for_others(const Range& chunk) {
    std::byte* const slot = group_.slot(rank_);
    const Range share = share_of(rank_, size_, chunk.size());
    stage_bytes(group_, slot, data_ + chunk.begin, share.begin);
    stage_bytes(group_, slot + share.end, data_ + chunk.begin + share.end, chunk.size() - share.end);
  }

  void reduce_share(const Range& chunk) {
    const Range share = share_of(rank_, size_, chunk.size());
    std::vector<std::byte*> outputs;
    for (int r = 0; r < size_; ++r) {
      std::byte* const place = r == rank_ ? data_ + chunk.begin + share.begin : group_.peer_slot(r) + share.begin;
      inputs_[r] = place;
      if (root_ == kEveryRank || root_ == r) outputs.push_back(place);
    }
    reduce(Outputs(outputs), share.size());
    if (root_ == kEveryRank) return;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_ && r != root_) claim_lines(group_.peer_slot(r) + share.begin, share.size());
    }
  }

  // The shares of the others, which they have left in what is my next slot.
  void take_shares(const Range& chunk) {
    for (int r = 0; r < size_; ++r) {
      const Range share = share_of(r, size_, chunk.size());
      if (r == rank_) continue;
      take_bytes(data_ + chunk.begin + share.begin, group_.slot(rank_) + share.begin, share.size(), share.size(), true);
    }
  }

  void reduce(std::byte* out, size_t num_bytes) { reduce(Outputs(out), num_bytes); }
  void reduce(const Outputs& outputs, size_t num_bytes) {
    reduce_inputs(outputs, inputs_, static_cast<int64_t>(num_bytes / item_bytes_), dtype_, op_);
  }

  shm::Group& group_;
  const shm::Fingerprint print_;
  std::byte* const data_;
  const size_t item_bytes_;
  const size_t num_bytes_;
  const c10::ScalarType dtype_;
  const ReduceOp op_;
  const int root_;
  const int rank_;
  const int size_;
  const bool wanted_;
  std::vector<const std::byte*> inputs_;
};

}  // namespace

void reduce_rounds(const Call& call, const shm::Fingerprint& print, std::byte* data, int64_t count,
                   c10::ScalarType dtype, ReduceOp op, int root) {
  Reduction(call, print, data, count, dtype, op, root).run();
}

}  // namespace torchtp::collectives
