#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "gradients/collective.h"
#include "gradients/options.h"

namespace torchtp::gradients {

// Gradients that travel together: one flat buffer of one dtype on one device, a view of it for each of its parameters.
//
// Behind the gradients the buffer carries marks, which are averaged with them: one for each parameter (1 where the rank
// has a gradient for it), and in the last bucket one for each rank (1 where that rank's backward failed).
class Bucket {
 public:
  // A complex parameter travels as pairs of its real dtype. num_ranks is 0 but for the last bucket.
  Bucket(const Collective& collective, std::vector<at::Tensor> parameters, int num_ranks, const Options& options);

  // parameter's gradient: its sizes, and its strides where they are dense (else contiguous).
  const at::Tensor& view(size_t slot) const { return views_[slot]; }
  size_t num_slots() const { return views_.size(); }
  int64_t num_bytes() const;  // what travels

  // All gradients must be in place. `present[slot]` tells for which this rank has one.
  void start(const Collective& collective, const std::vector<bool>& present, bool failed);
  bool started() const { return static_cast<bool>(work_); }
  // The mean over the ranks, or their sum, is in the views afterwards.
  void wait(const Collective& collective);
  bool present_somewhere(size_t slot) const;
  std::vector<int> failed_ranks() const;  // CPU only: on other devices a failure arrives as NaN

  // Nanoseconds of the steady clock; measured while `measure` was set at start, 0 otherwise.
  int64_t started_at() const { return started_at_; }
  int64_t done_at() const { return done_at_ ? done_at_->load() : 0; }
  void measure(bool on) { measures_ = on; }

 private:
  at::Tensor& payload() { return compressed_.defined() ? compressed_ : flat_; }

  at::Tensor flat_;
  at::Tensor compressed_;  // defined where compression applies
  at::Tensor marks_;
  at::Tensor failures_;
  std::vector<at::Tensor> views_;
  bool average_;
  bool measures_ = false;
  int64_t started_at_ = 0;
  std::shared_ptr<std::atomic<int64_t>> done_at_;
  c10::intrusive_ptr<c10d::Work> work_;
};

int64_t steady_nanoseconds();

}  // namespace torchtp::gradients
