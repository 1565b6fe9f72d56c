#include "shm/hosts.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "core/format.h"
#include "shm/handover.h"
#include "shm/introduction.h"

namespace torchtp::shm {

namespace {

// Runs a step everywhere and swaps the results; what fails on one rank is thrown on all.
std::vector<std::string> together(Bootstrap& bootstrap, const std::function<std::string()>& step) {
  std::string mine;
  try {
    mine = "+" + step();
  } catch (const std::exception& error) {
    mine = cat("-", error.what());
  }
  std::vector<std::string> all = bootstrap.all_gather(mine);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank][0] != '+') {
      throw Error(cat("rank ", rank, " cannot find out who is on its host: ", all[rank].substr(1)));
    }
    all[rank].erase(0, 1);
  }
  return all;
}

Fd file_with(const std::string& content) {
  Fd file = Fd::memory("torchtp-host");
  if (pwrite(file.get(), content.data(), content.size(), 0) != static_cast<ssize_t>(content.size())) {
    throw_errno("cannot write an anonymous file");
  }
  return file;
}

bool contains(const Fd& file, const std::string& content) {
  std::string read(content.size(), 0);
  return pread(file.get(), read.data(), read.size(), 0) == static_cast<ssize_t>(read.size()) && read == content;
}

}  // namespace

std::vector<std::vector<int>> find_hosts(Bootstrap& bootstrap, const Deadline& deadline) {
  const int rank = bootstrap.rank(), size = bootstrap.size();
  if (size == 1) return {{0}};

  std::unique_ptr<Handover> handover;
  std::vector<std::string> processes, addresses;
  for (const std::string& words : together(bootstrap, [&] {
         handover = std::make_unique<Handover>();
         return own_process() + " " + handover->address();
       })) {
    const size_t space = std::min(words.find(' '), words.size());
    processes.push_back(words.substr(0, space));
    addresses.push_back(words.substr(std::min(space + 1, words.size())));
  }
  const auto watched = std::make_shared<KnownProcesses>(std::move(processes), rank);
  bootstrap.watch([watched](int peer) { return watched->has_died(peer); });
  // The first rank that can be reached at all.
  std::optional<Receiver> receiver;
  const std::vector<std::string> firsts = together(bootstrap, [&] {
    for (int peer = 0; peer < rank; ++peer) {
      try {
        receiver.emplace(addresses[peer]);
        return std::to_string(peer);
      } catch (const Error&) {
        // on another host
      }
    }
    return std::to_string(rank);
  });
  std::vector<std::vector<int>> members(size);
  for (int r = 0; r < size; ++r) members[std::stoi(firsts[r])].push_back(r);
  together(bootstrap, [&] {
    for (int r = 0; r < size; ++r) {
      const int first = std::stoi(firsts[r]), second = std::stoi(firsts[first]);
      if (second == first) continue;
      throw Error(cat("rank ", r, " reaches rank ", first, " over a UNIX socket, and rank ", first, " reaches rank ",
                      second, ", which rank ", r, " does not"));
    }
    if (!receiver) {
      if (members[rank].size() == 1) return std::string();
      handover->serve(file_with(addresses[rank]), static_cast<int>(members[rank].size()) - 1, deadline);
    } else if (!contains(receiver->receive(deadline), addresses[std::stoi(firsts[rank])])) {
      throw Error(cat("rank ", firsts[rank], " handed over another file than it has"));
    }
    return std::string();
  });

  std::vector<std::vector<int>> hosts;
  for (const std::vector<int>& host : members) {
    if (!host.empty()) hosts.push_back(host);
  }
  return hosts;
}

}  // namespace torchtp::shm
