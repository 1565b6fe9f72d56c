#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/patient_store.h"
#include "core/deadline.h"
#include "shm/bootstrap.h"
#include "shm/group.h"
#include "shm/outside_wait.h"

namespace torchtp::backend {

// What a group made before knows of the ranks of one that is being made. Each may be empty.
struct Acquaintance {
  std::function<shm::Presence(int rank)> presence;
  std::function<std::unique_ptr<shm::OutsideWait>(int rank)> wait_for;  // nothing where it does not know the rank
};

// Bootstrap over a c10d store. A store outlives the groups made on it (torchrun's lives as long as the job) and
// prefixes repeat, so each rank counts its arrivals and keys carry that generation. A rank that gives up leaves word
// why: the others throw that, and where several do, all throw what the first one said.
class StoreBootstrap : public shm::Bootstrap {
 public:
  StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout,
                 Acquaintance before = {});

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& mine) override;
  void watch(std::function<bool(int)> has_died) override { watched_ = std::move(has_died); }
  void read_why_others_gave_up() override;
  void let_others_hear() override;
  bool is_over() const override { return over_; }

  // For a rank that waits for something else while the group is made: throws what has put an end to that.
  void look();
  // What has failed on this rank itself, for those that look: all_gather says it to all once they have come there.
  void tell_of_failure(const std::string& why, int suspect);

  // What a handler of the program's signals has raised, if one has: a wait that it ended may have turned it into words.
  std::exception_ptr interruption() const { return *interruption_; }

  // Until no word is waited for any more: one timeout after all ranks have come.
  std::chrono::milliseconds left() const;

  const std::string& prefix() const { return prefix_; }  // of the keys of this generation

  // Of some of the ranks, whose place in `members` is their rank; made by those alone.
  StoreBootstrap among(const std::vector<int>& members) const;

 private:
  // Of those that are waited for the first that is missing.
  struct Awaited {
    int rank;
    Deadline deadline;
    std::optional<Deadline> stall;
    std::unique_ptr<shm::OutsideWait> wait;
    void end() const {  // it has come
      if (wait) wait->end();
    }
  };

  StoreBootstrap(const std::shared_ptr<PatientStore>& store, int rank, int size, std::chrono::milliseconds timeout);
  StoreBootstrap(std::shared_ptr<PatientStore> store, int rank, int size, std::chrono::milliseconds timeout,
                 std::string prefix, std::vector<int> names);
  shm::Presence presence(int rank) const;
  void wait_for(const std::vector<std::string>& keys);
  void look_for(Awaited& awaited);
  void report_missing(int rank, const shm::OutsideWait* wait) const;
  void look_at(int rank, int awaited);
  void look_around(int awaited);
  void tell(const std::string& why, int suspect);
  void handle_signals();
  std::string ended() const;  // "; rank 1 has ended" of those that have
  [[noreturn]] void give_up_for(int rank);
  void end_for_all(const std::string& why, int suspect);
  [[noreturn]] void give_up(const std::string& why, int suspect);
  bool all_have_come() const { return round_ > 1; }
  std::string key(int rank) const { return key(rank, round_); }
  std::string key(int rank, int64_t round) const;

  static constexpr int kNobody = -1;

  const std::shared_ptr<PatientStore> store_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::milliseconds stall_;  // after which it is said whom the rank waits for
  const std::string prefix_;
  const std::vector<int> names_;  // of the ranks, for errors
  int64_t round_ = 0;
  bool over_ = false;
  int suspect_ = kNobody;        // who may have ended unseen, of what is over
  std::optional<Deadline> end_;  // of all rounds, once all ranks have come
  std::function<bool(int)> watched_;
  Acquaintance before_;
  std::shared_ptr<std::exception_ptr> interruption_ = std::make_shared<std::exception_ptr>();
};

}  // namespace torchtp::backend
