#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shm/circle.h"
#include "shm/layout.h"
#include "shm/told_wait.h"

namespace torchtp::shm {

// What this process waits for in each of its groups, told in all of them: who misses this rank in one group can say
// that it waits in another. One object a process; whoever makes groups hands it to them. Thread-safe.
class Whereabouts {
 public:
  struct Wait {
    std::string call;
    std::string missing;
    uint64_t for_ranks = 0;  // of the wait's group
    bool is_blocked = false;
    int64_t since_ns = 0;
  };

  // `processes`: of each rank, as far as they are known to be different ones; `mine`: where this rank tells its waits.
  void add(const Group& group, std::string name, std::vector<std::string> processes, Board& mine);
  void remove(const Group& group);

  // Looks whether the circle still goes on in which this rank waits, of which `group` misses some ranks, and for
  // another one if not, as far as one group of this process tells of all of it. Returns whether it is the same.
  bool follow(const Group& group, uint64_t missing, Circle& circle) const;

 private:
  friend class LongWait;

  struct Member {
    const Group* group;
    std::string name;
    std::vector<std::string> processes;
    Board* mine;
  };
  struct Entry {
    uint64_t id;
    const Group* group;
    Wait wait;
    int64_t failed_ns;
  };

  uint64_t begin(const Group& group, Wait wait);
  void change(uint64_t id, Wait wait);
  void end(uint64_t id);
  void fail(uint64_t id);
  Entry* find(uint64_t id);
  const Member* find(const Group& group) const;
  void tell_all() const;
  ToldWait told(const Entry& entry, const Member& to) const;

  mutable std::mutex mutex_;  // of the members below
  std::vector<Member> members_;
  std::vector<Entry> waits_;  // those that go on before those that have failed, each oldest first
  uint64_t last_id_ = 0;
};

// One wait, which may become long. What was told of it stays when it fails, until its group ends. Not thread-safe.
class LongWait {
 public:
  LongWait(std::shared_ptr<Whereabouts> whereabouts, const Group& group);
  ~LongWait();  // without end() the wait has failed
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  // Is told anew only where it waits otherwise than before. `since_ns` is the birth of this object.
  void tell(Whereabouts::Wait wait);
  bool tells(uint64_t for_ranks, bool is_blocked) const {
    return id_ != 0 && for_ranks_ == for_ranks && is_blocked_ == is_blocked;
  }
  void end() noexcept;  // what was waited for has come

 private:
  const std::shared_ptr<Whereabouts> whereabouts_;
  const Group& group_;
  const int64_t since_ns_;
  uint64_t id_ = 0;  // 0: nothing has been told
  uint64_t for_ranks_ = 0;
  bool is_blocked_ = false;
};

}  // namespace torchtp::shm
