#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "spatial/cut.h"

namespace torchtp::exchange {
class DeviceExchange;
}

namespace torchtp::spatial {

// A pull that leaves own rows where they are, and the others' where they arrived: nothing is laid into one tensor. For
// kernels that read halos from pieces of their own (kernels/halo_planes.h).
//
// On a device everything is enqueued on the current stream, in this order: the constructor sends; work that needs no
// halo may follow; wait(); work that reads before() and after(); release(), after which nothing enqueued may read them.
// before() and after() may be asked for only after wait(). Every rank of the group makes one where the others make one
// or a Pulling of the same wanted intervals, and at most one other exchange of the group may begin between the
// constructor and release().
class Halos {
 public:
  // Every rank r gets rows `wanted[r]` (clipped to [0, cut.extent)) of the global tensor.
  Halos(const at::Tensor& own, const Cut& cut, const std::vector<Interval>& wanted);
  // The own rows of cut.dim lie in several tensors, stacked along another dim: those above, own ones, those below, so
  // that corners travel too. Undefined ones are left out; at least one is defined, and all are dense in one layout.
  Halos(const std::vector<at::Tensor>& stacked, int64_t stacked_dim, const Cut& cut,
        const std::vector<Interval>& wanted);
  Halos(const Halos&) = delete;
  Halos& operator=(const Halos&) = delete;
  ~Halos();

  void wait();
  void release();

  // Rows from the first wanted one to the first own one, and from behind the last own one to behind the last wanted
  // one: defined, perhaps of 0 rows, dense in the layout of own rows. As large as the stack along the stacked dim. What
  // lies there and is not wanted, because a rank wants nothing near its own rows, is zero.
  const at::Tensor& before() const { return before_.tensor; }
  const at::Tensor& after() const { return after_.tensor; }

 private:
  // Rows on one side of own ones, and which message fills them alone.
  struct Side {
    Interval rows;  // global
    at::Tensor tensor;
    int message = -1;  // of the receives: stays where it arrives
    std::vector<int64_t> sizes = {};
  };

  void start_on_host(const std::vector<at::Tensor>& stacked, int64_t stacked_dim, const Cut& cut, const PullPlan& plan);
  void start_on_device(const std::vector<at::Tensor>& stacked, int64_t stacked_dim, const Cut& cut,
                       const PullPlan& plan);
  Side& side_of(const PullPlan::Part& part) { return part.rows.begin < before_.rows.end ? before_ : after_; }

  std::shared_ptr<exchange::Exchange> exchange_;
  std::shared_ptr<exchange::DeviceExchange> device_exchange_;  // null where exchange_ serves
  at::Tensor like_;
  Side before_, after_;
  uint64_t ticket_ = 0;
  enum class State { kNothing, kUnderWay, kHeld } state_ = State::kNothing;
};

// The rows before and after own ones that Halos of this plan have.
std::pair<Interval, Interval> beside(const PullPlan& plan);

}  // namespace torchtp::spatial
