#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>

#include "core/fd.h"
#include "core/format.h"
#include "core/mapping.h"
#include "ranks.h"

namespace torchtp::test {

// Ranks as forked processes: a page for each rank in memory all of them map.
class ProcessBootstrap final : public shm::Bootstrap {
 public:
  struct Page {
    std::atomic<uint64_t> step;
    char text[2][2000];
  };

  ProcessBootstrap(std::byte* pages, int rank, int size)
      : pages_(reinterpret_cast<Page*>(pages)), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void watch(std::function<bool(int)> has_died) override { has_died_ = std::move(has_died); }

  std::vector<std::string> all_gather(const std::string& mine) override {
    char* const text = pages_[rank_].text[++step_ & 1];
    CHECK(mine.size() < sizeof(Page::text[0]));
    text[mine.copy(text, mine.size())] = 0;
    pages_[rank_].step.store(step_);
    std::vector<std::string> all;
    for (int rank = 0; rank < size_; ++rank) {
      while (pages_[rank].step.load() < step_) {
        std::this_thread::yield();
        if (!has_died_ || !has_died_(rank) || pages_[rank].step.load() >= step_) continue;
        throw Error(cat("rank ", rank, " died (its process is gone) while the group was being made"));
      }
      all.emplace_back(pages_[rank].text[step_ & 1]);
    }
    return all;
  }

 private:
  Page* pages_;
  int rank_, size_;
  uint64_t step_ = 0;
  std::function<bool(int)> has_died_;
};

// Runs the body in one forked process a rank; the victim's may end as it likes, all others must succeed.
inline void run_processes(int size, const RankBody& body, int victim = -1) {
  const size_t num_bytes = size * sizeof(ProcessBootstrap::Page);
  const Fd file = Fd::memory("pages");
  CHECK(ftruncate(file.get(), static_cast<off_t>(num_bytes)) == 0);
  const Mapping pages(file, num_bytes);
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    alarm(60);  // whoever hangs is ended
    int status = 0;
    try {
      ProcessBootstrap bootstrap(pages.data(), rank, size);
      body(bootstrap);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      status = 1;
    }
    _exit(status);
  }
  std::string failed;
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    if (rank != victim && status != 0) failed += " " + std::to_string(rank);
  }
  if (!failed.empty()) throw std::runtime_error("these ranks failed:" + failed);
}

}  // namespace torchtp::test
