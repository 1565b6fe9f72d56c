#pragma once

#include <string>

#include "core/deadline.h"
#include "core/fd.h"

namespace torchtp::shm {

// Rank 0's side of handing a file descriptor to the other ranks: an abstract socket with a random name. Only processes
// of the same user that know the token get it.
class Handover {
 public:
  Handover();

  const std::string& address() const { return address_; }  // socket name and token, for the bootstrap
  // Hands `file` to `count` receivers, all of which have already greeted. Once.
  void serve(const Fd& file, int count, const Deadline& deadline);

 private:
  std::string address_;
  Fd socket_;
};

// The other ranks' side: greet, then (when rank 0 knows that all have greeted) receive.
class Receiver {
 public:
  explicit Receiver(const std::string& address, Fd socket = Fd::unix_socket());
  Fd receive(const Deadline& deadline);

 private:
  Fd socket_;
};

}  // namespace torchtp::shm
