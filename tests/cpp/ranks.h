#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "shm/bootstrap.h"

namespace torchtp::test {

// Ranks as threads: a board under a mutex. share() lets them use one mapping.
class ThreadBoard {
 public:
  explicit ThreadBoard(int size) : size_(size), texts_(size) {}

  std::vector<std::string> all_gather(int rank, const std::string& mine) {
    std::unique_lock<std::mutex> lock(mutex_);
    texts_[rank] = mine;
    const uint64_t generation = generation_;
    if (++arrived_ == size_) {
      result_ = texts_;
      arrived_ = 0;
      ++generation_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return generation_ != generation || given_up_; });
      if (generation_ == generation) throw std::runtime_error("another rank has failed");
    }
    return result_;
  }

  std::shared_ptr<void> share(int rank, std::shared_ptr<void> mine) {
    if (rank == 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      shared_ = std::move(mine);
    }
    all_gather(rank, "");
    std::lock_guard<std::mutex> lock(mutex_);
    return shared_;
  }

  void give_up() {
    std::lock_guard<std::mutex> lock(mutex_);
    given_up_ = true;
    changed_.notify_all();
  }

  int size() const { return size_; }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> texts_, result_;
  int arrived_ = 0;
  uint64_t generation_ = 0;
  bool given_up_ = false;
  std::shared_ptr<void> shared_;
};

class ThreadBootstrap final : public shm::Bootstrap {
 public:
  ThreadBootstrap(std::shared_ptr<ThreadBoard> board, int rank) : board_(std::move(board)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return board_->size(); }
  std::vector<std::string> all_gather(const std::string& mine) override { return board_->all_gather(rank_, mine); }
  std::shared_ptr<void> share(std::shared_ptr<void> mine) override { return board_->share(rank_, std::move(mine)); }

 private:
  std::shared_ptr<ThreadBoard> board_;
  int rank_;
};

using RankBody = std::function<void(shm::Bootstrap&)>;

// Runs the body once a rank. Throws the error of the lowest rank that has one; whoever waits for that rank must find
// out by itself (the group was left, the alarm).
inline void run_threads(int size, const RankBody& body) {
  auto board = std::make_shared<ThreadBoard>(size);
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadBootstrap bootstrap(board, rank);
      try {
        body(bootstrap);
      } catch (...) {
        errors[rank] = std::current_exception();
        board->give_up();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// What the step throws.
template <typename Step>
std::string error_of(const Step& step) {
  try {
    step();
  } catch (const std::exception& error) {
    return error.what();
  }
  throw std::runtime_error("an error was expected, none was thrown");
}

inline void check_contains(const std::string& text, const std::string& part, const char* file, int line) {
  if (text.find(part) == std::string::npos) fail(file, line, "'" + part + "' is not in: " + text);
}

}  // namespace torchtp::test

#define CHECK_CONTAINS(text, part) torchtp::test::check_contains(text, part, __FILE__, __LINE__)
