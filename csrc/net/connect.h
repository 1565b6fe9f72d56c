#pragma once

#include <map>
#include <string>

#include "core/deadline.h"
#include "core/fd.h"
#include "net/address.h"

namespace torchtp::net {

// Where ranks of other hosts knock while a group is made. Of those who do, only who knows the token of this door is let
// in, and whom it lets in learns by the answer that it is the right one; tokens travel through the bootstrap alone.
class Door {
 public:
  // `interfaces`: see own_address().
  explicit Door(const std::string& interfaces);

  // For the others, through the bootstrap: "10.0.0.1 4711 <token>".
  std::string introduction() const;

  // A connection to each rank of `introductions`; collective among them. Throws when one has not come by the deadline
  // or cannot be reached.
  std::map<int, Fd> connect(int rank, const std::map<int, std::string>& introductions, const Deadline& deadline) const;

 private:
  Address address_;
  const std::string token_;
  const Fd listener_;
};

}  // namespace torchtp::net
