#include "backend/host_message.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "collectives/call.h"
#include "core/clock.h"
#include "core/format.h"

namespace torchtp::backend {

HostMessage::HostMessage(std::shared_ptr<HostLinks> links, int rank, c10d::OpType op, const char* title,
                         const at::Tensor& tensor, int peer, int tag, std::chrono::milliseconds timeout)
    : MessageWork(rank, op, title, 0, {tensor}, {tensor}),
      links_(std::move(links)),
      receives_(op != c10d::OpType::SEND),
      timeout_(timeout),
      tag_(tag),
      peer_(peer),
      dense_(tensor, !receives_) {
  try {
    const auto owner = std::make_shared<at::Tensor>(dense_.memory());
    net::Mail::Memory memory(owner, dense_.data());
    message_ = receives_ ? links_->receive(peer, tag, std::move(memory), dense_.contents())
                         : links_->send(peer, tag, std::move(memory), dense_.contents());
  } catch (...) {
    std::rethrow_exception(as_dist_error(std::current_exception()));
  }
}

bool HostMessage::wait(std::chrono::milliseconds timeout) {
  if (claim()) {
    begin_wait(timeout != kNoTimeout);
    finish(timeout == kNoTimeout ? timeout_ : timeout);
  }
  return wait_for_others(kNoTimeout);
}

void HostMessage::finish(std::chrono::milliseconds timeout) {
  std::exception_ptr error;
  try {
    const char* const direction = receives_ ? " from " : " to ";
    const std::string call =
        cat(receives_ ? "recv of " : "send of ", collectives::describe_contents(dense_.contents()), " with tag ", tag_,
            direction, peer_ < 0 ? std::string("any rank") : cat("rank ", peer_));
    peer_ = links_->wait(message_, Deadline(timeout), call);
    const at::NoGradGuard no_grad;
    if (receives_) dense_.store();
  } catch (...) {
    error = as_dist_error(std::current_exception());
  }
  message_.reset();
  complete({error, peer_, -1, now_ns()});  // when its partner came nobody tells: all the time was for him
}

}  // namespace torchtp::backend
