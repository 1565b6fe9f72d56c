#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "core/fd.h"
#include "net/address.h"

namespace torchtp::net {

// One connection between two ranks, as one of them sees it: the other, and what it is for.
struct Line {
  int peer;
  int use;
  bool operator<(const Line& other) const { return std::tie(peer, use) < std::tie(other.peer, other.use); }
};

// This rank cannot come to where another one waits: no word of that one's has been heard yet.
class Unreachable : public Error {
 public:
  Unreachable(int peer, const std::string& why) : Error(why), peer_(peer) {}
  int peer() const { return peer_; }

 private:
  int peer_;
};

// Where other ranks knock while a group is made. Of those who do, only who knows the token of this door is let
// in, and whom it lets in learns by the answer that it is the right one; tokens travel through the bootstrap alone.
// The lower rank of two calls the other; where its calls do not arrive (a firewall, an address of a private network),
// that one calls back a second later.
class Door {
 public:
  // `interfaces`: see own_address().
  explicit Door(const std::string& interfaces);

  // For the others, through the bootstrap: "10.0.0.1 4711 <token>".
  std::string introduction() const;

  // The connections `lines`; the ranks at their other ends wait for the same. introductions[r] is that of rank r.
  // Throws when one has not come by the deadline, and Unreachable. `look` is called every 20 ms meanwhile: what it
  // throws ends the wait.
  std::map<Line, Fd> connect(
      int rank, const std::set<Line>& lines, const std::vector<std::string>& introductions, const Deadline& deadline,
      const std::function<void()>& look = [] {}) const;

 private:
  Address address_;
  const std::string token_;
  const Fd listener_;
};

}  // namespace torchtp::net
