#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shm/layout.h"

namespace torchtp::shm {

// A wait of a rank that has become long, as it is told to those who miss that rank.
struct ToldWait {
  int64_t since_ns = 0;     // core/clock.h; 0: there is none
  int64_t failed_ns = 0;    // 0: it goes on
  uint64_t for_ranks = 0;   // of the group that it is told in, as far as they are in it
  uint64_t is_blocked = 0;  // a round or an exchange, on the process' first thread: that one will not come elsewhere
  char call[184] = {};      // "allreduce #7 (...) of group 'tp'"; where it is told in its own group without that
  char missing[40] = {};    // "ranks 2, 3", as they are called in the wait's own group; empty where `call` says it
};

// The oldest waits of a rank.
using ToldWaits = std::array<ToldWait, kToldWaits>;
static_assert(sizeof(ToldWaits) == kToldWords * sizeof(uint64_t), "it travels as whole words");

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
  void tell_all() const;
  ToldWait told(const Entry& entry, const Member& to) const;

  std::mutex mutex_;  // of the members below
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

  // Is told anew only where it waits for others than before. `since_ns` is the birth of this object.
  void tell(Whereabouts::Wait wait);
  bool tells(uint64_t for_ranks) const { return id_ != 0 && for_ranks_ == for_ranks; }
  void end() noexcept;  // what was waited for has come

 private:
  const std::shared_ptr<Whereabouts> whereabouts_;
  const Group& group_;
  const int64_t since_ns_;
  uint64_t id_ = 0;  // 0: nothing has been told
  uint64_t for_ranks_ = 0;
};

}  // namespace torchtp::shm
