#include "spatial/slab.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <vector>

namespace torchtp::spatial {
namespace {

// What `layout` of a message means: the memory format its payload is contiguous in.
enum Layout : uint32_t { kContiguous = 0, kChannelsLast = 1, kChannelsLast3d = 2 };

Layout layout_of(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return kContiguous;
  return tensor.dim() == 5 ? kChannelsLast3d : kChannelsLast;
}

at::MemoryFormat format_of(uint32_t layout) {
  if (layout == kChannelsLast) return at::MemoryFormat::ChannelsLast;
  return layout == kChannelsLast3d ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::Contiguous;
}

// Rows of a dense tensor's dim: `num_blocks` runs of `block_bytes`, `stride_bytes` apart.
struct Blocks {
  std::byte* data;
  size_t num_blocks;
  size_t block_bytes;
  size_t stride_bytes;

  size_t num_bytes() const { return num_blocks * block_bytes; }

  // Calls run(memory, offset in the payload, bytes) for each contiguous piece of payload [offset, offset + num_bytes).
  template <typename Run>
  void for_each(size_t offset, size_t num_bytes, const Run& run) const {
    if (num_bytes == 0) return;
    size_t block = offset / block_bytes, inside = offset % block_bytes, done = 0;
    while (done < num_bytes) {
      const size_t piece = std::min(block_bytes - inside, num_bytes - done);
      run(data + block * stride_bytes + inside, done, piece);
      done += piece;
      inside = 0;
      ++block;
    }
  }
};

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

class RowsSource : public exchange::Source {
 public:
  RowsSource(const at::Tensor& tensor, const Blocks& blocks) : tensor_(tensor), blocks_(blocks) {}
  void read(size_t offset, std::byte* out, size_t num_bytes) const override {
    blocks_.for_each(offset, num_bytes,
                     [&](const std::byte* from, size_t at, size_t bytes) { std::memcpy(out + at, from, bytes); });
  }

 private:
  at::Tensor tensor_;  // keeps the memory
  Blocks blocks_;
};

// A message in another layout than ours is gathered whole and then copied by ATen: rare (ranks whose shard has one
// column or one channel cannot tell the layouts apart), so not fast.
class RowsSink : public exchange::Sink {
 public:
  RowsSink(const at::Tensor& tensor, int64_t dim, const Interval& rows)
      : tensor_(tensor), dim_(dim), rows_(rows), blocks_(blocks_of(tensor, dim, rows)), layout_(layout_of(tensor)) {}

  void write(uint32_t layout, size_t offset, const std::byte* in, size_t num_bytes) override {
    if (layout == layout_) {
      blocks_.for_each(offset, num_bytes, [&](std::byte* to, size_t at, size_t bytes) { merge(to, in + at, bytes); });
      return;
    }
    at::Tensor target = tensor_.narrow(dim_, rows_.begin, rows_.size());
    if (!foreign_.defined()) foreign_ = at::empty(target.sizes(), target.options(), format_of(layout));
    std::memcpy(static_cast<std::byte*>(foreign_.data_ptr()) + offset, in, num_bytes);
    if (offset + num_bytes == blocks_.num_bytes()) merge_tensor(target, foreign_);
  }

 protected:
  virtual void merge(std::byte* to, const std::byte* from, size_t num_bytes) { std::memcpy(to, from, num_bytes); }
  virtual void merge_tensor(at::Tensor& to, const at::Tensor& from) { to.copy_(from); }

  at::Tensor tensor_;

 private:
  int64_t dim_;
  Interval rows_;
  Blocks blocks_;
  Layout layout_;
  at::Tensor foreign_;
};

template <typename T>
void add_elements(std::byte* to, const std::byte* from, size_t num_bytes) {
  T* target = reinterpret_cast<T*>(to);
  const T* source = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < num_bytes / sizeof(T); ++i) target[i] = target[i] + source[i];
}

using AddElements = void (*)(std::byte*, const std::byte*, size_t);

AddElements add_elements_of(at::ScalarType type) {
  AddElements add = nullptr;
  AT_DISPATCH_V2(type, "push_add", AT_WRAP([&] { add = &add_elements<scalar_t>; }), AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),
                 at::kHalf, at::kBFloat16);
  return add;
}

class AddingSink : public RowsSink {
 public:
  AddingSink(const at::Tensor& tensor, int64_t dim, const Interval& rows)
      : RowsSink(tensor, dim, rows), add_(add_elements_of(tensor.scalar_type())) {}

 protected:
  void merge(std::byte* to, const std::byte* from, size_t num_bytes) override { add_(to, from, num_bytes); }
  void merge_tensor(at::Tensor& to, const at::Tensor& from) override { to.add_(from); }

 private:
  AddElements add_;
};

}  // namespace

at::Tensor dense(const at::Tensor& tensor) { return tensor.contiguous(tensor.suggest_memory_format()); }

exchange::Send send_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer) {
  const Blocks blocks = blocks_of(tensor, dim, rows);
  return {peer, layout_of(tensor), blocks.num_bytes(), std::make_shared<RowsSource>(tensor, blocks)};
}

exchange::Receive receive_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer) {
  return {peer, blocks_of(tensor, dim, rows).num_bytes(), std::make_shared<RowsSink>(tensor, dim, rows)};
}

exchange::Receive add_rows(const at::Tensor& tensor, int64_t dim, const Interval& rows, int peer) {
  return {peer, blocks_of(tensor, dim, rows).num_bytes(), std::make_shared<AddingSink>(tensor, dim, rows)};
}

}  // namespace torchtp::spatial
