#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <string>

#include "core/error.h"
#include "kernels/divider.h"
#include "kernels/halo_slab.h"
#include "kernels/vectors.h"

namespace torchtp::kernels {

// Elements side by side, or one of 16 bytes.
struct alignas(16) Bytes16 {
  uint64_t low, high;
};

// Goes before every part of a payload.
struct HaloHeader {
  uint64_t ticket = 0;     // of the exchange
  uint64_t num_bytes = 0;  // of the whole payload
  uint64_t offset = 0;     // of this part
  uint32_t layout = 0;     // opaque, but for being equal or not; see HaloLayout
  uint32_t unused[9] = {};
};
static_assert(sizeof(HaloHeader) == 64);

// What arrives is copied, or added to what is there.
enum class HaloMerge : uint32_t { kCopy, kInt8, kInt16, kInt32, kInt64, kHalf, kBFloat16, kFloat, kDouble };

inline int64_t bytes_of(HaloMerge merge) {
  switch (merge) {
    case HaloMerge::kCopy:
    case HaloMerge::kInt8:
      return 1;
    case HaloMerge::kInt16:
    case HaloMerge::kHalf:
    case HaloMerge::kBFloat16:
      return 2;
    case HaloMerge::kInt32:
    case HaloMerge::kFloat:
      return 4;
    case HaloMerge::kInt64:
    case HaloMerge::kDouble:
      return 8;
  }
  return 1;
}

// A payload is dense in its sender's layout: channels first or last. A receiver with another layout in mind finds the
// elements of [batches, channels, positions] where the sender's layout has put them.
struct HaloLayout {
  uint32_t layout = 0;
  bool channels_last = false;
  uint32_t element_bytes = 1;
  int64_t channels = 1, positions = 1;

  // Of one channel or position both layouts are the same.
  TORCHTP_HOST_DEVICE bool matters() const { return channels > 1 && positions > 1; }
};

// Units [0, count) from unit `first` of a slab on, between tensor and payload. Plain numbers for a kernel.
struct HaloMove {
  std::byte* tensor;
  std::byte* payload;  // of the whole payload, as if all of it lay there
  uint32_t first, count, unit;
  Divider run, outer;  // units
  int64_t row_stride, outer_stride, payload_stride;
  HaloMerge merge;
  const HaloHeader* header;  // of the part that arrived, else null
  HaloLayout layout;
  uint32_t* layout_out;  // null, or where the sender's layout is written
  uint64_t part_offset, part_bytes;

  // Byte offsets in tensor and payload of a unit of the slab.
  struct Spot {
    int64_t tensor, payload;
  };
  TORCHTP_HOST_DEVICE Spot spot(uint32_t index) const {
    const auto at = static_cast<int32_t>(index);  // below kMostSlabUnits
    const int32_t block = outer.quotient(at), in_block = at - block * outer.divisor;
    const int32_t row = run.quotient(in_block), column = in_block - row * run.divisor;
    return {(block * outer_stride + row * row_stride + column) * unit, (block * payload_stride + in_block) * unit};
  }

  // The part [begin, begin + bytes) of a payload that starts at `payload`.
  static HaloMove make(const HaloSlab& slab, std::byte* payload, int64_t begin, int64_t bytes,
                       HaloMerge merge = HaloMerge::kCopy) {
    HaloMove move{};
    int64_t unit = unit_of(slab, payload);
    if (merge != HaloMerge::kCopy && unit != 16) unit = bytes_of(merge);
    if (slab.num_bytes() / unit > kMostSlabUnits) {
      throw Error("a halo of " + std::to_string(slab.num_bytes()) + " bytes that can be moved " + std::to_string(unit) +
                  " at once only is too large");
    }
    const auto first = bytes_before(slab, begin), end = bytes_before(slab, begin + bytes);
    move.tensor = slab.data;
    move.payload = payload + slab.payload_begin;
    move.unit = static_cast<uint32_t>(unit);
    move.first = static_cast<uint32_t>(first / unit);
    move.count = static_cast<uint32_t>((end - first) / unit);
    move.run = Divider(slab.run_bytes / unit);
    move.outer = Divider(slab.outer_bytes() / unit);
    move.row_stride = slab.row_stride / unit;
    move.outer_stride = slab.outer_stride / unit;
    move.payload_stride = slab.payload_stride / unit;
    move.merge = merge;
    move.part_offset = static_cast<uint64_t>(begin);
    move.part_bytes = static_cast<uint64_t>(bytes);
    return move;
  }

 private:
  // How many bytes of the slab lie before `position` of the payload.
  static int64_t bytes_before(const HaloSlab& slab, int64_t position) {
    const int64_t in_outer = slab.outer_bytes(), from = position - slab.payload_begin;
    if (from <= 0 || slab.num_bytes() == 0) return 0;
    if (slab.outer == 1) return std::min(from, in_outer);
    const int64_t blocks = std::min(from / slab.payload_stride, slab.outer);
    return blocks * in_outer +
           (blocks < slab.outer ? std::min(from - blocks * slab.payload_stride, in_outer) : int64_t{0});
  }
};

// Threads begin, begin + step, ... of all that share the move. Four loads are under way before the first is stored.
template <typename T, bool kPack>
TORCHTP_HOST_DEVICE void copy_units(const HaloMove& move, uint32_t begin, uint32_t step) {
  const auto load = [&](const HaloMove::Spot& spot) {
    return *reinterpret_cast<const T*>(kPack ? move.tensor + spot.tensor : move.payload + spot.payload);
  };
  const auto store = [&](const HaloMove::Spot& spot, const T& value) {
    *reinterpret_cast<T*>(kPack ? move.payload + spot.payload : move.tensor + spot.tensor) = value;
  };
  uint32_t i = begin;
  for (; i + 3 * step < move.count; i += 4 * step) {
    const auto a = move.spot(move.first + i), b = move.spot(move.first + i + step),
               c = move.spot(move.first + i + 2 * step), d = move.spot(move.first + i + 3 * step);
    const T at_a = load(a), at_b = load(b), at_c = load(c), at_d = load(d);
    store(a, at_a);
    store(b, at_b);
    store(c, at_c);
    store(d, at_d);
  }
  for (; i < move.count; i += step) {
    const auto spot = move.spot(move.first + i);
    store(spot, load(spot));
  }
}

template <typename T>
TORCHTP_HOST_DEVICE T sum_of(const T& a, const T& b) {
  if constexpr (sizeof(T) == 2 && !std::is_integral_v<T>) {
    return static_cast<T>(static_cast<float>(a) + static_cast<float>(b));
  } else {
    return static_cast<T>(a + b);
  }
}

template <typename T, int kCount>
TORCHTP_HOST_DEVICE void add_packs(const HaloMove& move, uint32_t begin, uint32_t step) {
  for (uint32_t i = begin; i < move.count; i += step) {
    const auto spot = move.spot(move.first + i);
    auto* const to = reinterpret_cast<Pack<T, kCount>*>(move.tensor + spot.tensor);
    const auto from = *reinterpret_cast<const Pack<T, kCount>*>(move.payload + spot.payload);
    Pack<T, kCount> result = *to;
#pragma unroll
    for (int k = 0; k < kCount; ++k) result.values[k] = sum_of(result.values[k], from.values[k]);
    *to = result;
  }
}

// Calls f with a value of the type that is added; for a copy, of nothing that needs more than bytes.
template <typename F>
TORCHTP_HOST_DEVICE void dispatch_merge(HaloMerge merge, const F& f) {
  switch (merge) {
    case HaloMerge::kInt8:
      return f(uint8_t{});
    case HaloMerge::kInt16:
      return f(uint16_t{});
    case HaloMerge::kInt32:
      return f(uint32_t{});
    case HaloMerge::kInt64:
      return f(uint64_t{});
    case HaloMerge::kHalf:
      return f(c10::Half{});
    case HaloMerge::kBFloat16:
      return f(c10::BFloat16{});
    case HaloMerge::kFloat:
      return f(float{});
    case HaloMerge::kDouble:
      return f(double{});
    case HaloMerge::kCopy:
      return;
  }
}

template <bool kPack>
TORCHTP_HOST_DEVICE void move_units(const HaloMove& move, uint32_t begin, uint32_t step) {
  switch (move.unit) {
    case 16:
      return copy_units<Bytes16, kPack>(move, begin, step);
    case 8:
      return copy_units<uint64_t, kPack>(move, begin, step);
    case 4:
      return copy_units<uint32_t, kPack>(move, begin, step);
    case 2:
      return copy_units<uint16_t, kPack>(move, begin, step);
    default:
      return copy_units<uint8_t, kPack>(move, begin, step);
  }
}

// The part came in another layout: rare (ranks whose shard has one column or one channel cannot tell the layouts
// apart), so an element at a time.
struct TransposedHalo {
  const HaloMove& move;

  TORCHTP_HOST_DEVICE uint32_t num_elements() const {
    return static_cast<uint32_t>(move.part_bytes / move.layout.element_bytes);
  }
  // Where element `index` of the part, in the sender's order, lies in the receiver's tensor.
  TORCHTP_HOST_DEVICE std::byte* place(uint32_t index) const {
    const HaloLayout& to = move.layout;
    const auto position = static_cast<int64_t>(move.part_offset / to.element_bytes) + index;
    const int64_t plane = to.channels * to.positions, n = position / plane, in_plane = position % plane;
    // The sender has channels last where we have them first, and the other way round.
    const int64_t inner = to.channels_last ? to.positions : to.channels;
    const int64_t mine = n * plane + in_plane % inner * (plane / inner) + in_plane / inner;
    const int64_t byte = mine * to.element_bytes;
    return move.tensor + move.spot(static_cast<uint32_t>(byte / move.unit)).tensor + byte % move.unit;
  }
  TORCHTP_HOST_DEVICE const std::byte* from(uint32_t index) const {
    return move.payload + move.part_offset + uint64_t{index} * move.layout.element_bytes;
  }
};

TORCHTP_HOST_DEVICE inline void take_transposed(const HaloMove& move, uint32_t begin, uint32_t step) {
  const TransposedHalo halo{move};
  for (uint32_t i = begin; i < halo.num_elements(); i += step) {
    std::byte* const to = halo.place(i);
    const std::byte* const from = halo.from(i);
    if (move.merge == HaloMerge::kCopy) {
      for (uint32_t byte = 0; byte < move.layout.element_bytes; ++byte) to[byte] = from[byte];
    } else {
      dispatch_merge(move.merge, [&](auto zero) {
        using T = decltype(zero);
        for (uint32_t at = 0; at < move.layout.element_bytes; at += sizeof(T)) {  // complex numbers are two
          auto* const value = reinterpret_cast<T*>(to + at);
          *value = sum_of(*value, *reinterpret_cast<const T*>(from + at));
        }
      });
    }
  }
}

TORCHTP_HOST_DEVICE inline void take_units(const HaloMove& move, uint32_t begin, uint32_t step) {
  if (move.layout_out != nullptr && begin == 0) *move.layout_out = move.header->layout;
  if (move.header != nullptr && move.header->layout != move.layout.layout && move.layout.matters()) {
    return take_transposed(move, begin, step);
  }
  if (move.merge == HaloMerge::kCopy) return move_units<false>(move, begin, step);
  dispatch_merge(move.merge, [&](auto zero) {
    using T = decltype(zero);
    if (move.unit == 16) return add_packs<T, 16 / sizeof(T)>(move, begin, step);
    // Units narrower than 16 bytes and wider than an element are cut into elements by who made the move.
    add_packs<T, 1>(move, begin, step);
  });
}

}  // namespace torchtp::kernels
