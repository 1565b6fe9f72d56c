#pragma once

#include <memory>

#include "backend/dense.h"
#include "backend/host_links.h"
#include "backend/message_work.h"

namespace torchtp::backend {

// A user's message between any two ranks of a group of several hosts. It moves by itself, but nobody is told of its
// end: it is complete when somebody has waited for it, or looked after it once it was there.
class HostMessage : public MessageWork {
 public:
  // `peer` is -1 for any. A default timeout for wait().
  HostMessage(std::shared_ptr<HostLinks> links, int rank, c10d::OpType op, const char* title, const at::Tensor& tensor,
              int peer, int tag, std::chrono::milliseconds timeout);

  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return peer_; }

 private:
  bool is_there() override { return !links_->is_under_way(message_) || wanted_for() >= timeout_; }
  void finish_claimed() override { finish(std::chrono::milliseconds(0)); }
  void finish(std::chrono::milliseconds timeout);

  const std::shared_ptr<HostLinks> links_;
  const bool receives_;
  const std::chrono::milliseconds timeout_;
  const int tag_;
  int peer_;
  Dense dense_;
  HostLinks::MessagePtr message_;
};

}  // namespace torchtp::backend
