#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "spatial/cut.h"

namespace torchtp::spatial {

// A pull under way: `extended` holds own rows and fill already, the other ranks' rows after finish().
class Pulling {
 public:
  // Every rank r gets rows `wanted[r]` (clipped to [0, cut.extent)) of the global tensor, laid into a tensor of rows
  // `frame` (this rank's; contains its clipped wanted interval); what is not wanted is `fill`.
  Pulling(const at::Tensor& input, const Cut& cut, const std::vector<Interval>& wanted, const Interval& frame,
          double fill);
  // The same by the plan of `wanted`.
  Pulling(const at::Tensor& input, const Cut& cut, const PullPlan& plan, const Interval& frame, double fill);
  at::Tensor finish();
  // Whether any rank of the group sends anything; only then is there a ticket.
  bool moves() const { return moves_; }
  uint64_t ticket() const { return ticket_; }
  const at::Tensor& extended() const { return extended_; }

 private:
  std::shared_ptr<exchange::Exchange> exchange_;
  at::Tensor extended_;
  uint64_t ticket_ = 0;
  bool moves_ = false;
};

// Start and finish in one. Returns the input itself when every rank holds just what it wants.
at::Tensor pull(const at::Tensor& input, const Cut& cut, const std::vector<Interval>& wanted, const Interval& frame,
                double fill = 0);

// The adjoint: `grad` has the rows of wanted[rank] (overhang is dropped); each row is added to what its owner has.
// Returns own rows.
at::Tensor push_add(const at::Tensor& grad, const Cut& cut, const std::vector<Interval>& wanted);

}  // namespace torchtp::spatial
