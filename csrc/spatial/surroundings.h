#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "kernels/depthwise.h"
#include "spatial/halos.h"

namespace torchtp::spatial {

// Pulls what lies beside own rows and columns: rows first, then columns of all those rows.
class Surroundings {
 public:
  using Wanted = std::vector<std::vector<Interval>>;  // of every cut, every rank

  // `own` is dense in `format`; so are all pieces.
  Surroundings(const at::Tensor& own, at::MemoryFormat format, const std::vector<Cut>& cuts, const Wanted& wanted)
      : own_(own), format_(format) {
    extents_ = {static_cast<int32_t>(own.size(1)), static_cast<int32_t>(own.size(2)),
                static_cast<int32_t>(own.size(3))};
    for (size_t i = 0; i < cuts.size(); ++i) {
      const auto [before, after] = beside(*cuts[i].group.plans->get(cuts[i].extent, cuts[i].group.rank, wanted[i]));
      (cuts[i].dim == 2 ? extents_.rows_above : extents_.columns_left) = static_cast<int32_t>(before.size());
      (cuts[i].dim == 2 ? extents_.rows_below : extents_.columns_right) = static_cast<int32_t>(after.size());
      if (cuts[i].dim == 2) {
        rows_.emplace(own, cuts[i], wanted[i]);
      } else {
        across_ = &cuts[i];
        wanted_across_ = &wanted[i];
      }
    }
    if (across_ && !rows_) columns_.emplace(own, *across_, *wanted_across_);
  }

  const kernels::HaloExtents& extents() const { return extents_; }
  // Everything is there for what is enqueued afterwards.
  void wait() {
    if (rows_) {
      rows_->wait();
      above_ = in_format(rows_->before());
      below_ = in_format(rows_->after());
      if (across_) columns_.emplace(stacked(), 2, *across_, *wanted_across_);
    }
    if (columns_) {
      columns_->wait();
      left_ = in_format(columns_->before());
      right_ = in_format(columns_->after());
    }
  }
  void release() {
    if (columns_) columns_->release();
    if (rows_) rows_->release();
  }
  // After wait(), until release(); undefined where that dim is not cut. Left and right ones are of all rows.
  const at::Tensor& above() const { return above_; }
  const at::Tensor& below() const { return below_; }
  const at::Tensor& left() const { return left_; }
  const at::Tensor& right() const { return right_; }
  // Before wait() with own rows and columns alone.
  template <typename T>
  kernels::HaloPlanes<T> planes() const {
    return {extents_, data<T>(own_), data<T>(above_), data<T>(below_), data<T>(left_), data<T>(right_)};
  }

 private:
  template <typename T>
  static const T* data(const at::Tensor& piece) {
    return piece.defined() ? piece.const_data_ptr<T>() : nullptr;
  }
  // A piece beside a shard without rows may have come in the other one.
  at::Tensor in_format(const at::Tensor& piece) const { return piece.contiguous(format_); }

  std::vector<at::Tensor> stacked() const {
    std::vector<at::Tensor> pieces;
    for (const at::Tensor& piece : {above_, own_, below_}) {
      if (piece.size(2) > 0) pieces.push_back(piece);
    }
    return pieces.empty() ? std::vector<at::Tensor>{own_} : pieces;
  }

  const at::Tensor own_;
  const at::MemoryFormat format_;
  at::Tensor above_, below_, left_, right_;
  kernels::HaloExtents extents_{};
  std::optional<Halos> rows_, columns_;
  const Cut* across_ = nullptr;
  const std::vector<Interval>* wanted_across_ = nullptr;
};

// Calls compute(part, planes): once where all is own, else for the interior and, when halos are there, for the border.
template <typename T, typename Compute>
void inside_then_border(Surroundings& surroundings, const Compute& compute) {
  if (!surroundings.extents().has_halo()) {
    surroundings.wait();  // others may want something
    compute(kernels::Part::kAll, surroundings.planes<T>());
    return;
  }
  compute(kernels::Part::kInterior, surroundings.planes<T>());
  surroundings.wait();
  compute(kernels::Part::kBorder, surroundings.planes<T>());
}

}  // namespace torchtp::spatial
