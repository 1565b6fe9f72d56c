#pragma once

#include <memory>
#include <string>

#include "shm/group.h"

namespace torchtp::shm {

// A long wait of this rank for one rank of a group that is for no call of that group, as for the making of another one.
// It is told to the ranks of all groups, so that whoever waits for this rank meanwhile sees a circle. Ends, if not by
// end(), as one that has failed. Not thread-safe.
class OutsideWait {
 public:
  OutsideWait(std::shared_ptr<Group> group, int rank, std::string what);
  ~OutsideWait();
  OutsideWait(const OutsideWait&) = delete;
  OutsideWait& operator=(const OutsideWait&) = delete;

  // To be asked every 50 ms or so: what is wrong, once the rank has waited for this one for so long that neither will
  // come; else "".
  std::string look();
  std::string describe() const;  // whom this rank waits for how long, and what is known of that one
  void end() noexcept;           // the rank has come

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace torchtp::shm
