#include "shm/introduction.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <sstream>
#include <utility>

#include "core/build_id.h"
#include "core/format.h"
#include "shm/host.h"
#include "shm/layout.h"

namespace torchtp::shm {

namespace {

// To be raised with every change of what ranks write for each other.
constexpr int kProtocol = 6;

// No spaces inside: "torchtp/protocol/layout/build".
std::string build() {
  return cat("torchtp/", kProtocol, "/", sizeof(Control), "-", sizeof(Board), "-", sizeof(RingControl), "/",
             build_id());
}

struct Parts {
  std::string place;  // pids and times of start mean the same to ranks of one place
  pid_t pid = 0;
  uint64_t started_at = 0;
};

bool parse(const std::string& process, Parts& parts) {
  std::istringstream text(process);
  char colon = 0;
  return std::getline(text, parts.place, '/') && text >> parts.pid >> colon >> parts.started_at && colon == ':' &&
         text.peek() == EOF && parts.pid > 0;
}

}  // namespace

// "host:namespaces/pid:started".
std::string own_process() {
  struct stat of_pids{}, of_time{};
  stat("/proc/self/ns/pid", &of_pids);
  stat("/proc/self/ns/time", &of_time);
  const auto self = look_at(getpid());
  return cat(host_identity(), ":", of_pids.st_ino, ":", of_time.st_ino, "/", getpid(), ":",
             self ? self->started_at : 0);
}

std::string introduction() { return build() + " " + own_process(); }

std::vector<std::string> processes_of(const std::vector<std::string>& introductions) {
  std::vector<std::string> processes;
  std::string first;
  for (size_t peer = 0; peer < introductions.size(); ++peer) {
    std::istringstream text(introductions[peer]);
    std::string theirs, process;
    text >> theirs >> process;
    if (peer == 0) first = theirs;
    if (theirs != first || theirs.rfind("torchtp/", 0) != 0) {
      throw Error(cat("rank ", peer, " runs another torchtp (", theirs, ") than rank 0 (", first,
                      "): install the same build for all ranks of a host"));
    }
    processes.push_back(process);
  }
  return processes;
}

KnownProcesses::KnownProcesses(std::vector<std::string> said, int rank) : said_(std::move(said)), peers_(said_.size()) {
  Parts mine;
  // Where this process cannot find itself, it would take the others for dead.
  if (!parse(said_.at(rank), mine) || mine.started_at == 0) return;
  for (size_t peer = 0; peer < said_.size(); ++peer) {
    Parts theirs;
    if (said_[peer] == said_[rank] || !parse(said_[peer], theirs)) continue;
    if (theirs.place != mine.place || theirs.started_at == 0) continue;
    // Under an emulator a process reads another time of itself than others read of it.
    const auto now = look_at(theirs.pid);
    if (now && now->started_at != theirs.started_at) continue;
    peers_[peer] = {theirs.pid, theirs.started_at};
  }
}

bool KnownProcesses::has_died(int rank) const {
  const Peer& peer = peers_.at(rank);
  if (peer.pid == 0) return false;
  if (const auto process = look_at(peer.pid)) return process->started_at != peer.started_at || process->is_gone();
  return kill(peer.pid, 0) != 0 && errno == ESRCH;  // who has no descriptor left sees nothing of the living either
}

}  // namespace torchtp::shm
