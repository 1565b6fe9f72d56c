#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/format.h"

namespace torchtp::shm {

// Where ranks meet has failed: what this one said last may have reached nobody.
class MeetingLost : public Error {
 public:
  using Error::Error;
};

// How ranks of one host swap small blobs before they share memory: the backend implements it over a c10d store (with a
// generation prefix), tests over threads.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Element r of the result is what rank r passed in. Collective; throws when a rank does not come.
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
  // From now on all_gather asks every few milliseconds whether the rank it waits for has died. Who has may have said
  // its part before.
  virtual void watch(std::function<bool(int rank)> has_died) { (void)has_died; }
  // Throws what has ended the making on another rank, or this one, if anything has.
  virtual void read_why_others_gave_up() {}
  // Before the error of one rank, which all have been told, is thrown: for as long as others need this rank to hear it.
  virtual void let_others_hear() {}
  // Whether that has been thrown to this rank's step, as to all others: then nobody comes to swap anything.
  virtual bool is_over() const { return false; }
  // Ranks that are threads of one process return what rank 0 passed in, so that all of them use one mapping (and the
  // thread sanitizer sees their races). Ranks that are processes return nullptr: they get the memory over a socket.
  virtual std::shared_ptr<void> share(std::shared_ptr<void> mine) {
    (void)mine;
    return nullptr;
  }
};

// Runs one step on every rank and swaps the strings it returns; where it throws on one rank, all throw "rank 1
// <trouble>: ".
template <typename Step>
std::vector<std::string> together(Bootstrap& bootstrap, const std::string& trouble, const Step& step) {
  std::string mine;
  try {
    mine = "+" + step();
  } catch (const std::exception& error) {
    if (bootstrap.is_over()) throw;
    mine = cat("-", error.what());
  }
  std::vector<std::string> all;
  try {
    all = bootstrap.all_gather(mine);
  } catch (const MeetingLost& lost) {
    if (mine[0] == '+') throw;
    throw MeetingLost(cat("rank ", bootstrap.rank(), " ", trouble, ": ", mine.substr(1), "; ", lost.what()));
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank][0] != '+') {
      bootstrap.read_why_others_gave_up();
      bootstrap.let_others_hear();
      throw Error(cat("rank ", rank, " ", trouble, ": ", all[rank].empty() ? "" : all[rank].substr(1)));
    }
    all[rank].erase(0, 1);
  }
  return all;
}

}  // namespace torchtp::shm
