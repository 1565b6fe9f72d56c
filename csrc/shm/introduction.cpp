#include "shm/introduction.h"

#include <sys/stat.h>
#include <unistd.h>

#include <sstream>

#include "core/build_id.h"
#include "core/format.h"
#include "shm/layout.h"

namespace torchtp::shm {

namespace {

// To be raised with every change of what ranks write for each other.
constexpr int kProtocol = 2;

// No spaces inside: "torchtp/protocol/layout/build".
std::string build() {
  return cat("torchtp/", kProtocol, "/", sizeof(Control), "-", sizeof(RingControl), "/", build_id());
}

// "namespace:pid:started". Pids mean the same to ranks of one pid namespace only.
std::string process() {
  struct stat pid_namespace{};
  stat("/proc/self/ns/pid", &pid_namespace);
  const auto self = look_at(getpid());
  return cat(pid_namespace.st_ino, ":", getpid(), ":", self ? self->started_at : 0);
}

struct Numbers {
  uint64_t pid_namespace = 0;
  pid_t pid = 0;
  uint64_t started_at = 0;
};

bool parse(const std::string& process, Numbers& numbers) {
  std::istringstream text(process);
  char first = 0, second = 0;
  return static_cast<bool>(text >> numbers.pid_namespace >> first >> numbers.pid >> second >> numbers.started_at) &&
         first == ':' && second == ':' && text.peek() == EOF && numbers.pid > 0;
}

}  // namespace

std::string introduction() { return build() + " " + process(); }

Introduced::Introduced(const std::vector<std::string>& introductions, int rank) {
  std::string first;
  Numbers mine;
  for (size_t peer = 0; peer < introductions.size(); ++peer) {
    std::istringstream text(introductions[peer]);
    std::string theirs, process;
    text >> theirs >> process;
    if (peer == 0) first = theirs;
    if (theirs != first || theirs.rfind("torchtp/", 0) != 0) {
      throw Error(cat("rank ", peer, " runs another torchtp (", theirs, ") than rank 0 (", first,
                      "): install the same build for all ranks of a host"));
    }
    processes_.push_back(process);
  }
  peers_.resize(processes_.size());
  // Where this process cannot find itself, it would take the others for dead.
  if (!parse(processes_[rank], mine) || mine.started_at == 0) return;
  for (size_t peer = 0; peer < processes_.size(); ++peer) {
    Numbers theirs;
    if (processes_[peer] == processes_[rank] || !parse(processes_[peer], theirs)) continue;
    if (theirs.pid_namespace != mine.pid_namespace || theirs.started_at == 0) continue;
    peers_[peer] = {theirs.pid, theirs.started_at};
  }
}

bool Introduced::has_died(int rank) const {
  const Peer& peer = peers_.at(rank);
  if (peer.pid == 0) return false;
  const auto process = look_at(peer.pid);
  return !process || process->started_at != peer.started_at || process->is_gone();
}

}  // namespace torchtp::shm
