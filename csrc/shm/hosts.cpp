#include "shm/hosts.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>
#include <utility>

#include "core/deadline.h"
#include "core/format.h"
#include "shm/handover.h"
#include "shm/introduction.h"

namespace torchtp::shm {

namespace {

constexpr char kTrouble[] = "cannot find out who is on its host";

Fd file_with(const std::string& content) {
  Fd file = Fd::memory("torchtp-host");
  if (pwrite(file.get(), content.data(), content.size(), 0) != static_cast<ssize_t>(content.size())) {
    throw_errno("cannot write an anonymous file (ulimit -f limits its size)");
  }
  return file;
}

bool contains(const Fd& file, const std::string& content) {
  std::string read(content.size(), 0);
  return pread(file.get(), read.data(), read.size(), 0) == static_cast<ssize_t>(read.size()) && read == content;
}

// What a rank says is not trusted: it becomes an index.
int number_up_to(int rank, const std::string& text) {
  int number = -1;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || number < 0 || number > rank) {
    throw Error(cat("rank ", rank, " says that it reaches rank '", text, "', which is none before it"));
  }
  return number;
}

}  // namespace

std::vector<std::vector<int>> find_hosts(Bootstrap& bootstrap, std::chrono::milliseconds longest) {
  const int rank = bootstrap.rank(), size = bootstrap.size();
  if (size == 1) return {{0}};

  std::unique_ptr<Handover> handover;
  std::vector<std::string> processes, addresses;
  for (const std::string& words : together(bootstrap, kTrouble, [&] {
         handover = std::make_unique<Handover>();
         return own_process() + " " + handover->address();
       })) {
    const size_t space = std::min(words.find(' '), words.size());
    processes.push_back(words.substr(0, space));
    addresses.push_back(words.substr(std::min(space + 1, words.size())));
  }
  const Deadline deadline(longest);
  const auto watched = std::make_shared<KnownProcesses>(std::move(processes), rank);
  bootstrap.watch([watched](int peer) { return watched->has_died(peer); });
  // The first rank that can be reached at all.
  std::optional<Receiver> receiver;
  const std::vector<std::string> firsts = together(bootstrap, kTrouble, [&] {
    for (int peer = 0; peer < rank; ++peer) {
      Fd socket = Fd::unix_socket();
      try {
        receiver.emplace(addresses[peer], std::move(socket));
        return std::to_string(peer);
      } catch (const Error&) {
        // on another host
      }
    }
    return std::to_string(rank);
  });
  std::vector<int> first_of(size);
  std::vector<std::vector<int>> members(size);
  for (int r = 0; r < size; ++r) {
    first_of[r] = number_up_to(r, firsts[r]);
    members[first_of[r]].push_back(r);
  }
  together(bootstrap, kTrouble, [&] {
    for (int r = 0; r < size; ++r) {
      const int first = first_of[r], second = first_of[first];
      if (second == first) continue;
      throw Error(cat("rank ", r, " reaches rank ", first, " over a UNIX socket, and rank ", first, " reaches rank ",
                      second, ", which rank ", r, " does not"));
    }
    if (!receiver) {
      if (members[rank].size() == 1) return std::string();
      const std::unique_ptr<Handover> door = std::move(handover);  // closed, whatever fails: who waits at it then knows
      door->serve(file_with(addresses[rank]), static_cast<int>(members[rank].size()) - 1, deadline);
    } else if (!contains(receiver->receive(deadline), addresses[first_of[rank]])) {
      throw Error(cat("rank ", first_of[rank], " handed over another file than it has"));
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
