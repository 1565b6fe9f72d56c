#include "spatial/slab.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "spatial/blocks.h"
#include "spatial/slab_place.h"

namespace torchtp::spatial {
namespace {

// What `layout` of a message means: the memory format its payload is contiguous in; on the CPU, in the bits above, the
// global extent of its dim, as far as there is room.
constexpr uint32_t kFormatBits = 8;
uint32_t with_extent(uint32_t format, int64_t extent) { return format | static_cast<uint32_t>(extent) << kFormatBits; }

enum SlabFormat : uint32_t { kContiguous = 0, kChannelsLast = 1, kChannelsLast3d = 2 };

SlabFormat layout_of(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return kContiguous;
  return tensor.dim() == 5 ? kChannelsLast3d : kChannelsLast;
}

at::MemoryFormat format_of(uint32_t layout) {
  if (layout == kChannelsLast) return at::MemoryFormat::ChannelsLast;
  return layout == kChannelsLast3d ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::Contiguous;
}

// From the sizes, not the strides: the stride of a dim of size 1 means nothing.
Blocks blocks_of(const at::Tensor& tensor, int64_t dim, const Interval& rows) {
  const bool channels_last = layout_of(tensor) != kContiguous;
  int64_t row = 1;  // elements from one row to the next
  if (!channels_last || dim != 1) {
    for (int64_t inner = dim + 1; inner < tensor.dim(); ++inner) row *= tensor.size(inner);
    if (channels_last && dim > 1) row *= tensor.size(1);
  }
  const int64_t item = tensor.element_size();
  const int64_t period = row * tensor.size(dim);
  const int64_t outer = period == 0 ? 0 : tensor.numel() / period;
  return {static_cast<std::byte*>(tensor.data_ptr()) + rows.begin * row * item, static_cast<size_t>(outer),
          static_cast<size_t>(rows.size() * row * item), static_cast<size_t>(period * item)};
}

constexpr size_t kPiece = 128 << 10;  // bytes a thread should have at least

// `num_bytes` of memory full of one value.
class Filling {
 public:
  Filling(at::ScalarType type, double value, size_t num_bytes) {
    if (value == 0 || num_bytes == 0) return;
    bytes_.resize(num_bytes);
    AT_DISPATCH_V2(type, "fill", AT_WRAP([&] {
                     const auto element = c10::Scalar(value).to<scalar_t>();
                     for (size_t at = 0; at < num_bytes; at += sizeof(element))
                       std::memcpy(&bytes_[at], &element, sizeof(element));
                   }),
                   AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX), at::kHalf, at::kBFloat16, at::kBool);
  }
  void write(std::byte* to, size_t num_bytes) const {
    if (bytes_.empty()) {
      std::memset(to, 0, num_bytes);
    } else {
      std::memcpy(to, bytes_.data(), num_bytes);
    }
  }

 private:
  std::vector<std::byte> bytes_;  // none: zeros
};

class RowsSource : public exchange::Source {
 public:
  RowsSource(const at::Tensor& tensor, const Blocks& blocks) : tensor_(tensor), blocks_(blocks) {}
  void read(size_t offset, std::byte* out, size_t num_bytes) const override {
    blocks_.for_each(offset, num_bytes,
                     [&](const std::byte* from, size_t at, auto bytes) { std::memcpy(out + at, from, bytes); });
  }

 private:
  at::Tensor tensor_;  // keeps the memory
  Blocks blocks_;
};

// A message in another layout than ours is gathered whole and then copied by ATen: rare (ranks whose shard has one
// column or one channel cannot tell the layouts apart), so not fast.
class RowsSink : public exchange::Sink {
 public:
  RowsSink(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer, int64_t extent)
      : tensor_(tensor),
        dim_(dim),
        rows_(rows),
        peer_(peer),
        extent_(extent),
        blocks_(blocks_of(tensor, dim, rows)),
        layout_(with_extent(layout_of(tensor), extent)) {}

  void write(uint32_t layout, size_t offset, const std::byte* in, size_t num_bytes) override {
    if (layout == layout_) return merge(blocks_, offset, in, num_bytes);
    check_extent(layout);
    at::Tensor target = tensor_.narrow(dim_, rows_.begin, rows_.size());
    const uint32_t format = layout & ((1U << kFormatBits) - 1);
    if (!foreign_.defined()) foreign_ = at::empty(target.sizes(), target.options(), format_of(format));
    std::memcpy(static_cast<std::byte*>(foreign_.data_ptr()) + offset, in, num_bytes);
    if (offset + num_bytes == blocks_.num_bytes()) merge_tensor(target, foreign_);
  }

 protected:
  virtual void merge(const Blocks& blocks, size_t offset, const std::byte* in, size_t num_bytes) {
    blocks.for_each(offset, num_bytes, [&](std::byte* to, size_t at, auto bytes) { std::memcpy(to, in + at, bytes); });
  }
  virtual void merge_tensor(at::Tensor& to, const at::Tensor& from) { to.copy_(from); }

  at::Tensor tensor_;

 private:
  void check_extent(uint32_t layout) const {
    if (layout >> kFormatBits == layout_ >> kFormatBits) return;
    throw Error(cat("dim ", dim_, " has a global extent of ", extent_, " where rows of it were expected and of ",
                    layout >> kFormatBits, " on rank ", peer_,
                    ", which sent them: ranks must hold parts of one image"));
  }

  int64_t dim_;
  Interval rows_;
  int peer_;
  int64_t extent_;
  Blocks blocks_;
  uint32_t layout_;
  at::Tensor foreign_;
};

template <typename T>
void add_blocks(const Blocks& blocks, size_t offset, const std::byte* in, size_t num_bytes) {
  blocks.for_each(offset, num_bytes, [&](std::byte* to, size_t at, auto bytes) {
    T* const target = reinterpret_cast<T*>(to);
    const T* const source = reinterpret_cast<const T*>(in + at);
    for (size_t i = 0; i < bytes / sizeof(T); ++i) target[i] = target[i] + source[i];
  });
}

using AddBlocks = void (*)(const Blocks&, size_t, const std::byte*, size_t);

AddBlocks add_blocks_of(at::ScalarType type) {
  AddBlocks add = nullptr;
  AT_DISPATCH_V2(type, "push_add", AT_WRAP([&] { add = &add_blocks<scalar_t>; }), AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),
                 at::kHalf, at::kBFloat16, at::kBool);
  return add;
}

class AddingSink : public RowsSink {
 public:
  AddingSink(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer, int64_t extent)
      : RowsSink(tensor, dim, rows, peer, extent), add_(add_blocks_of(tensor.scalar_type())) {}

 protected:
  void merge(const Blocks& blocks, size_t offset, const std::byte* in, size_t num_bytes) override {
    add_(blocks, offset, in, num_bytes);
  }
  void merge_tensor(at::Tensor& to, const at::Tensor& from) override { to.add_(from); }

 private:
  AddBlocks add_;
};

}  // namespace

at::Tensor with_format(const at::Tensor& tensor) {
  if ((tensor.dim() != 4 && tensor.dim() != 5) || tensor.is_contiguous()) return tensor;
  const auto last = tensor.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  if (tensor.suggest_memory_format() == last || !tensor.is_contiguous(last)) return tensor;
  return tensor.as_strided(tensor.sizes(), tensor.dim() == 4 ? c10::get_channels_last_strides_2d(tensor.sizes())
                                                             : c10::get_channels_last_strides_3d(tensor.sizes()));
}

at::Tensor dense(const at::Tensor& tensor) { return tensor.contiguous(tensor.suggest_memory_format()); }

void lay_rows(const at::Tensor& from, const Interval& rows, const at::Tensor& to, int64_t at, const Interval& before,
              const Interval& after, int64_t dim, double fill) {
  if (to.numel() == 0 || (rows.empty() && before.empty() && after.empty())) return;
  if (!to.is_cpu()) {
    if (!before.empty()) to.narrow(dim, before.begin, before.size()).fill_(fill);
    if (!rows.empty()) to.narrow(dim, at, rows.size()).copy_(from.narrow(dim, rows.begin, rows.size()));
    if (!after.empty()) to.narrow(dim, after.begin, after.size()).fill_(fill);
    return;
  }
  const Blocks source = blocks_of(from, dim, rows), target = blocks_of(to, dim, {at, at + rows.size()}),
               left = blocks_of(to, dim, before), right = blocks_of(to, dim, after);
  const Filling filling(to.scalar_type(), fill, std::max(left.block_bytes, right.block_bytes));
  // A tensor of one row or channel may be in either layout, and grow into another than it is read in.
  const bool same_layout = layout_of(from) == layout_of(to);
  const size_t pieces = source.block_bytes / kPiece + 1;
  const auto grain = static_cast<int64_t>(kPiece / (target.stride_bytes / pieces + 1) + 1);
  at::parallel_for(0, static_cast<int64_t>(target.num_blocks * pieces), grain, [&](int64_t begin, int64_t end) {
    for (size_t work = begin; work < static_cast<size_t>(end); ++work) {
      const size_t block = work / pieces, piece = work % pieces;
      if (piece == 0 && left.block_bytes > 0) {
        filling.write(left.data + block * left.stride_bytes, left.block_bytes);
      }
      if (same_layout && !rows.empty()) {
        const size_t first = source.block_bytes * piece / pieces, last = source.block_bytes * (piece + 1) / pieces;
        std::memcpy(target.data + block * target.stride_bytes + first,
                    source.data + block * source.stride_bytes + first, last - first);
      }
      if (piece == 0 && right.block_bytes > 0) {
        filling.write(right.data + block * right.stride_bytes, right.block_bytes);
      }
    }
  });
  if (!same_layout && !rows.empty()) to.narrow(dim, at, rows.size()).copy_(from.narrow(dim, rows.begin, rows.size()));
}

at::Tensor padded(const at::Tensor& tensor, at::IntArrayRef pads) {
  const bool fits = std::all_of(pads.begin(), pads.end(), [](int64_t rows) { return rows == 0; });
  return fits ? tensor : at::constant_pad_nd(tensor, pads);
}

exchange::Send send_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer, int64_t extent) {
  const Blocks blocks = blocks_of(tensor, dim, rows);
  const uint32_t layout = with_extent(layout_of(tensor), extent);
  return {peer, layout, blocks.num_bytes(), std::make_shared<RowsSource>(tensor, blocks)};
}

exchange::Receive receive_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer, int64_t extent) {
  const size_t num_bytes = blocks_of(tensor, dim, rows).num_bytes();
  return {peer, num_bytes, std::make_shared<RowsSink>(tensor, dim, rows, peer, extent)};
}

exchange::Receive add_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer, int64_t extent) {
  const size_t num_bytes = blocks_of(tensor, dim, rows).num_bytes();
  return {peer, num_bytes, std::make_shared<AddingSink>(tensor, dim, rows, peer, extent)};
}

kernels::HaloSlab halo_slab(const at::Tensor& tensor, int64_t dim, const Interval& rows) {
  const Blocks blocks = blocks_of(tensor, dim, rows);
  kernels::HaloSlab slab;
  slab.data = blocks.data;
  slab.outer = 1;
  slab.rows = static_cast<int64_t>(blocks.num_blocks);
  slab.run_bytes = static_cast<int64_t>(blocks.block_bytes);
  slab.row_stride = static_cast<int64_t>(blocks.stride_bytes);
  return slab;
}

uint32_t layout_number(const at::Tensor& tensor) { return layout_of(tensor); }

}  // namespace torchtp::spatial
