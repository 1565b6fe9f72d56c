// The allreduce of HostsEngine, of more than a few KB: in blocks, several under way at a time.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <utility>

#include "backend/dense.h"
#include "backend/hosts_engine.h"
#include "collectives/allreduce.h"

namespace torchtp::backend {
namespace {

using collectives::partial_op;
using collectives::Piece;

// Of two hosts, and what each of more hosts sends another of a block, up to kMostShares of them: what goes in smaller
// bits wakes somebody for each.
constexpr size_t kShareBytes = size_t{1} << 20;
constexpr size_t kMostShares = 4;
// A block's area is written again four blocks later: two to go between hosts, one until all have read what came of it.
constexpr int kNumAreas = 4;
// Each host adds up everything, with one message between two hosts instead of two, while a rank sends no more than this
// for it than by shares. Of two hosts always: as many bytes travel either way.
constexpr size_t kExtraBytes = size_t{256} << 10;

}  // namespace

// A block goes through these steps, one in each turn; every turn has one round of the host's ranks.
//   stage    what others of this host own is copied to where they can read it
//   (round)
//   gather   the owner of a piece adds it up over this host, and sends to each other host the share which that one sums
//   combine  the owner adds up its share of the piece over the hosts, and sends the sum to them; of two hosts part by
//            part as it arrives, while it is in the cache
//   (round)  after the other hosts' shares have come
//   spread   everybody takes the pieces from their owners
// Where the data of all ranks lie in the heap, or a host has one rank, they are worked on where they are.
class HostsEngine::Blocks {
 public:
  Blocks(HostsEngine& engine, const shm::Fingerprint& print, std::byte* data, int64_t count, at::ScalarType dtype,
         ReduceOp op)
      : engine_(engine),
        host_(*engine.host_),
        print_(print),
        data_(data),
        item_bytes_(c10::elementSize(dtype)),
        count_(count),
        block_bytes_(engine.num_hosts() == 2 ? kShareBytes : kShareBytes * std::min(hosts(), kMostShares)),
        block_(static_cast<int64_t>(block_bytes_ / item_bytes_)),
        num_blocks_((count + block_ - 1) / block_),
        dtype_(dtype),
        op_(op),
        me_(engine.here_.index),
        direct_((hosts() - 1) * (hosts() - 2) * count * item_bytes_ / hosts() <= kExtraBytes * engine.num_pieces()),
        places_(host_.size(), nullptr) {}

  void run() {
    meet();
    const int64_t under_way = direct_ ? 2 : 1;  // turns that what is gathered has to travel
    for (int64_t turn = 0; turn < num_blocks_ + 2; ++turn) {
      if (turn < num_blocks_ && way_ == Way::kStaged) stage(turn);
      if (turn >= under_way && turn < num_blocks_ + under_way) combine(turn - under_way);
      if (turn >= 2) engine_.finish(std::exchange(sums_[turn % 2], {}), print_);
      host_.round(print_);
      if (turn < num_blocks_) gather(turn);
      if (turn >= 2) spread(turn - 2);
    }
    if (way_ == Way::kInPlace) host_.round(print_);  // others read in this rank's data until then
  }

 private:
  enum class Way {
    kAlone,    // the host's only rank
    kInPlace,  // all data lie in heaps
    kStaged,   // through areas in the heaps
    kSlots,    // some heap has no room for areas: summed through the slots before, spread through them
  };

  // All ranks know that all call the same, and where the others' data or areas lie.
  void meet() {
    const size_t num_bytes = count_ * item_bytes_, areas_bytes = kNumAreas * block_bytes_;
    host_.round(print_, host_.heap_offset(data_, num_bytes));
    const bool in_heaps = collectives::all_in_heap(host_);
    if (in_heaps) find(num_bytes);
    engine_.meet(print_, nullptr, 0);
    const bool stages = !in_heaps && host_.size() > 1;
    std::byte* const areas = stages ? engine_.bounce_buffer(areas_bytes) : nullptr;
    host_.round(print_, areas != nullptr ? host_.heap_offset(areas, areas_bytes) : -1);
    if (host_.size() == 1) {
      way_ = Way::kAlone;
    } else if (in_heaps) {
      way_ = Way::kInPlace;
    } else if (collectives::all_in_heap(host_)) {
      way_ = Way::kStaged;
      find(areas_bytes);
    } else {
      way_ = Way::kSlots;
      collectives::allreduce(engine_.call(print_), data_, count_, dtype_, partial_op(op_));
    }
    if (way_ == Way::kAlone || way_ == Way::kSlots) places_[me_] = data_;
    adds_on_arrival_ = engine_.num_hosts() == 2 && (way_ == Way::kInPlace || way_ == Way::kStaged);
    const size_t most = most_between();
    for (at::Tensor& each : engine_.between_) {
      if (each.defined() && static_cast<size_t>(each.numel()) >= most) continue;
      each = at::empty({static_cast<int64_t>(most)}, at::TensorOptions().dtype(at::kByte));
    }
  }

  size_t hosts() const { return static_cast<size_t>(engine_.num_hosts()); }

  // Bytes of a block that lie between hosts here, at most: of parts the first is the longest.
  size_t most_between() const {
    const int64_t count = std::min(block_, count_);
    if (adds_on_arrival_) return count * item_bytes_;  // at their places in the block
    const int64_t piece = part_of(count, engine_.num_pieces(), 0).count();
    const int64_t share = direct_ ? piece : part_of(piece, engine_.num_hosts(), 0).count();
    size_t num_shares = 0;
    for (int i = 0; i < engine_.num_pieces(); ++i) num_shares += engine_.local_carrier(i) == me_ ? hosts() - 1 : 0;
    return num_shares * share * item_bytes_;
  }

  void find(size_t num_bytes) {
    for (int r = 0; r < host_.size(); ++r) places_[r] = host_.peer_heap(r, num_bytes);
  }

  int64_t size_of(int64_t block) const { return std::min(block_, count_ - block * block_); }
  std::byte* data_of(int64_t block) const { return data_ + block * block_bytes_; }
  std::byte* place_of(int64_t block, int rank) const {
    return places_[rank] + (way_ == Way::kStaged ? block % kNumAreas : block) * block_bytes_;
  }

  // Calls body(index, owner, range of the block) for each piece.
  template <typename Body>
  void for_each_piece(int64_t block, const Body& body) const {
    for (int i = 0; i < engine_.num_pieces(); ++i) {
      body(i, engine_.local_carrier(i), part_of(size_of(block), engine_.num_pieces(), i));
    }
  }

  // What host h adds up of a piece.
  Range share_of(const Range& piece, int h) const {
    if (direct_) return piece;
    const Range part = part_of(piece.count(), engine_.num_hosts(), h);
    return {piece.begin + part.begin, piece.begin + part.end};
  }

  void stage(int64_t block) const {
    for_each_piece(block, [&](int, int owner, const Range& piece) {
      const size_t offset = piece.begin * item_bytes_;
      if (owner == me_) return;
      collectives::stage_bytes(host_, place_of(block, me_) + offset, data_of(block) + offset,
                               piece.count() * item_bytes_);
    });
  }

  void gather(int64_t block) {
    std::byte* arriving = bytes_of(engine_.between_[block % 2]);
    for_each_piece(block, [&](int i, int owner, const Range& piece) {
      if (owner != me_) return;
      if (adds_on_arrival_) return swap(block, i, piece);
      if (way_ == Way::kInPlace || way_ == Way::kStaged) reduce_here(block, piece, place_of(block, me_));
      const Range share = share_of(piece, engine_.here_.host);
      for (int h = 0; h < engine_.num_hosts(); ++h) {
        if (h == engine_.here_.host) continue;
        const size_t num_bytes = share.count() * item_bytes_;
        partials_[block % 2].push_back(engine_.links_->stream_from(engine_.carrier(h, i), arriving, num_bytes));
        arriving += num_bytes;
        partials_[block % 2].push_back(send(h, i, place_of(block, me_), share_of(piece, h)));
      }
    });
  }

  // With the other of two hosts.
  void swap(int64_t block, int index, const Range& piece) {
    std::byte* const here = bytes_of(engine_.between_[block % 2]);
    reduce_here(block, piece, here);
    const int other = 1 - engine_.here_.host;
    const size_t begin = piece.begin * item_bytes_, num_bytes = piece.count() * item_bytes_;
    const auto add = [this, block, here, begin](const std::byte* part, size_t offset, size_t part_bytes) {
      const size_t at = begin + offset;
      Inputs inputs{here + at, part};
      if (engine_.here_.host == 1) std::swap(inputs[0], inputs[1]);
      std::byte* const sum = data_of(block) + at;
      collectives::reduce_inputs(sum, inputs, static_cast<int64_t>(part_bytes / item_bytes_), dtype_, op_,
                                 engine_.size_);
      collectives::copy_bytes(place_of(block, me_) + at, sum, part_bytes);
    };
    partials_[block % 2].push_back(engine_.links_->stream_from(engine_.carrier(other, index), num_bytes, add));
    partials_[block % 2].push_back(send(other, index, here, piece));
  }

  HostLinks::MessagePtr send(int h, int index, const std::byte* base, const Range& range) {
    return engine_.links_->stream_to(engine_.carrier(h, index), base + range.begin * item_bytes_,
                                     range.count() * item_bytes_);
  }

  void reduce_here(int64_t block, const Range& piece, std::byte* base) const {
    const size_t offset = piece.begin * item_bytes_;
    Inputs inputs;
    for (int r = 0; r < host_.size(); ++r) {
      inputs.push_back((r == me_ ? data_of(block) : place_of(block, r)) + offset);
    }
    collectives::reduce_inputs(base + offset, inputs, piece.count(), dtype_, partial_op(op_));
  }

  void combine(int64_t block) {
    engine_.finish(std::exchange(partials_[block % 2], {}), print_);
    if (adds_on_arrival_) return;
    std::byte* const mine = place_of(block, me_);
    const std::byte* arrived = bytes_of(engine_.between_[block % 2]);
    for_each_piece(block, [&](int i, int owner, const Range& piece) {
      if (owner != me_) return;
      const Range share = share_of(piece, engine_.here_.host);
      std::byte* const sum = mine + share.begin * item_bytes_;
      Inputs inputs;
      for (int h = 0; h < engine_.num_hosts(); ++h) {
        inputs.push_back(h == engine_.here_.host ? sum : std::exchange(arrived, arrived + share.count() * item_bytes_));
      }
      collectives::reduce_inputs(sum, inputs, share.count(), dtype_, op_, engine_.size_);
      for (int h = 0; h < engine_.num_hosts() && !direct_; ++h) {
        if (h == engine_.here_.host) continue;
        const Range theirs = share_of(piece, h);
        sums_[block % 2].push_back(engine_.links_->stream_from(engine_.carrier(h, i), mine + theirs.begin * item_bytes_,
                                                               theirs.count() * item_bytes_));
        sums_[block % 2].push_back(send(h, i, mine, share));
      }
    });
  }

  void spread(int64_t block) const {
    if (way_ == Way::kAlone) return;
    if (way_ == Way::kSlots) {
      std::vector<Piece> pieces;
      for_each_piece(block, [&](int, int owner, const Range& piece) {
        std::byte* const place = data_of(block) + piece.begin * item_bytes_;
        pieces.push_back({place, place, piece.count(), owner});
      });
      return collectives::spread_pieces(engine_.call(print_), print_, pieces, dtype_);
    }
    for_each_piece(block, [&](int, int owner, const Range& piece) {
      const size_t offset = piece.begin * item_bytes_;
      if (owner == me_ && adds_on_arrival_) return;  // it is there
      collectives::copy_bytes(data_of(block) + offset, place_of(block, owner) + offset, piece.count() * item_bytes_);
    });
  }

  HostsEngine& engine_;
  shm::Group& host_;
  const shm::Fingerprint print_;
  std::byte* const data_;
  const size_t item_bytes_;
  const int64_t count_;
  const size_t block_bytes_;
  const int64_t block_;  // elements
  const int64_t num_blocks_;
  const at::ScalarType dtype_;
  const ReduceOp op_;
  const int me_;  // among the ranks of the host
  const bool direct_;
  Way way_ = Way::kAlone;
  bool adds_on_arrival_ = false;
  std::vector<std::byte*> places_;  // of each rank of the host
  // Of even and odd blocks.
  std::array<std::vector<HostLinks::MessagePtr>, 2> partials_, sums_;
};

void HostsEngine::reduce_in_blocks(const shm::Fingerprint& print, std::byte* data, int64_t count, at::ScalarType dtype,
                                   ReduceOp op) {
  Blocks(*this, print, data, count, dtype, op).run();
}

}  // namespace torchtp::backend
