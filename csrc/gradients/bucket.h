#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradients/collective.h"
#include "gradients/instant.h"
#include "gradients/options.h"
#include "gradients/side_stream.h"

namespace torchtp::gradients {

// Gradients that travel together: one flat buffer of one dtype on one device, a view of it for each of its parameters.
//
// Behind the gradients the buffer carries marks, which are averaged with them: one for each parameter (1 where the rank
// has a gradient for it, kArrived where this backward has added to it), and in the last bucket one for each rank (1
// where that rank's backward failed, 2 more where its hooks failed in the one before).
//
// Gradients come into the buffer in one of two ways. On the CPU the caller copies each when it is there, as long as the
// cache has it. On CUDA they stay where they are until the last one is there; then one launch packs them all, scaled
// and compressed, on the side stream.
class Bucket {
 public:
  // A complex parameter travels as pairs of its real dtype. num_ranks is 0 but for the last bucket.
  // `label` names it in messages of the backend: "bucket 5: conv2.weight ...".
  Bucket(const Collective& collective, std::vector<at::Tensor> parameters, std::string label, int num_ranks,
         const Options& options, std::shared_ptr<const SideStream> side);

  // parameter's gradient: its sizes, and its strides where they are dense (else contiguous).
  const at::Tensor& view(size_t slot) const { return views_[slot]; }
  // Before other numbers come into the view of a gradient that is none any more: who has kept it, or a part of it,
  // keeps its numbers, in memory of their own.
  void let_go(size_t slot);
  // Before gradients come: makes views anew that the program has put into other memory with the gradient, which is an
  // alias (share_memory_, a queue of torch.multiprocessing).
  void renew_views();
  size_t num_slots() const { return views_.size(); }
  int64_t num_bytes() const;  // what travels
  // All gradients, without marks; what no gradient covers is 0.
  at::Tensor gradients() const { return flat_.narrow(0, 0, num_elements_); }

  // Whether start() packs; else every gradient must be in its view by then, and be zero where there is none.
  bool packs() const { return packs_; }
  // A gradient has been written on the current stream; start() comes after that on any stream.
  void note_writer();
  // gradients[slot]: what this rank has for it, anywhere; undefined if nothing. After `failed` what they hold is lost.
  void start(const Collective& collective, const std::vector<at::Tensor>& gradients, const std::vector<bool>& arrived,
             bool failed);
  bool started() const { return static_cast<bool>(work_); }
  // The mean over the ranks, or their sum, is in the views afterwards, for what the current stream does next.
  void wait(const Collective& collective);
  bool present_somewhere(size_t slot) const;
  bool arrived_somewhere(size_t slot) const;
  std::vector<int> failed_ranks() const;  // CPU only: on other devices a failure arrives as NaN
  // Whether hooks that were held back raised in the pass before this one.
  void tell_hooks(bool raised) { hooks_raised_ = raised; }
  std::vector<int> ranks_whose_hooks_raised() const;  // CPU only
  // How many gradients this rank had from before the backward, as the others had; below 0 if they need not be as many.
  void tell_kept(int64_t num) { num_kept_ = num; }
  // Those that told most and fewest of them to the last bucket, if they are not as many. CPU only.
  std::optional<std::pair<int, int>> ranks_that_kept_others() const;

  // Measured while `measure` was set at start.
  const std::optional<Instant>& started_at() const { return started_at_; }
  std::optional<Instant> done_at() const { return done_at_ ? done_at_->get() : std::nullopt; }
  void measure(bool on) { measures_ = on; }

 private:
  const at::Tensor& payload() const { return compressed_.defined() ? compressed_ : flat_; }
  std::byte* begin_of(size_t slot) const;
  at::Tensor make_view(size_t slot, const at::TensorOptions& options, at::IntArrayRef sizes,
                       at::IntArrayRef strides) const;
  void pack(const std::vector<at::Tensor>& gradients, double scale);
  void mark(const at::Tensor& buffer, const std::vector<double>& marks, int rank, bool failed, double scale) const;
  double marked(size_t slot) const;  // the mean of all ranks' marks
  std::vector<int> ranks_that_told(int what) const;
  void start_copied(const Collective& collective, const std::vector<double>& marks, bool failed);
  void start_packed(const Collective& collective, const std::vector<at::Tensor>& gradients,
                    const std::vector<double>& marks, bool failed);

  std::shared_ptr<const SideStream> side_;
  at::Tensor flat_;
  at::Tensor compressed_;  // defined where compression applies
  int64_t num_elements_;
  int64_t num_ranks_;
  int64_t num_kept_ = 0;
  bool hooks_raised_ = false;
  std::vector<at::Tensor> views_;
  std::vector<int64_t> begins_;  // of the views, in the buffer's numbers
  std::vector<c10::Stream> writers_;
  std::string label_;
  bool average_;
  int size_;  // of the group
  bool packs_;
  bool measures_ = false;
  std::optional<Instant> started_at_;
  std::shared_ptr<LaterInstant> done_at_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// Whether both are the same numbers in the same memory.
bool is_same_memory(const at::Tensor& a, const at::Tensor& b);

}  // namespace torchtp::gradients
