#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <vector>

namespace torchtp::gradients {

// What a reducer needs of a process group, whatever its backend. Keeps the group not alive: every call throws once it
// has been destroyed.
class Collective {
 public:
  explicit Collective(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Zeros, one-dimensional; in memory that all ranks see where the backend offers it, so that reducing copies nothing.
  at::Tensor allocate(int64_t num_elements, const at::TensorOptions& options) const;

  // Starts to replace `buffer` by its mean over the ranks. The caller keeps it and waits for the work.
  c10::intrusive_ptr<c10d::Work> start_mean(const at::Tensor& buffer) const;
  // Whether start_mean multiplies by 1/size beforehand: in a 16-bit buffer, better done before rounding to 16 bits.
  bool divides_beforehand(const at::Device& device) const;
  c10::intrusive_ptr<c10d::Work> start_sum(const at::Tensor& buffer) const;

  void broadcast(const at::Tensor& buffer, int root) const;
  // Element r is what rank r passed in.
  std::vector<std::string> all_gather(const std::string& mine, const at::Device& device) const;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group() const;
  c10::intrusive_ptr<c10d::Work> start(const at::Tensor& buffer, const c10d::ReduceOp& op) const;

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  int rank_;
  int size_;
};

}  // namespace torchtp::gradients
