#pragma once

#include <memory>
#include <mutex>

#include "backend/dense.h"
#include "backend/host_links.h"
#include "backend/message_work.h"

namespace torchtp::backend {

// A user's message between any two ranks of a group of several hosts. It moves by itself, but nobody is told of its
// end: it is complete when somebody has waited for it, as with gloo.
class HostMessage : public MessageWork {
 public:
  // `peer` is -1 for any. A default timeout for wait().
  HostMessage(std::shared_ptr<HostLinks> links, int rank, c10d::OpType op, const char* title, const at::Tensor& tensor,
              int peer, int tag, std::chrono::milliseconds timeout);

  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return peer_; }
  // Waits: nobody else would complete it.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void end(std::chrono::milliseconds timeout);

  const std::shared_ptr<HostLinks> links_;
  const bool receives_;
  const std::chrono::milliseconds timeout_;
  const int tag_;
  std::mutex waiting_;
  bool ended_ = false;
  int peer_;
  Dense dense_;
  HostLinks::MessagePtr message_;
};

}  // namespace torchtp::backend
