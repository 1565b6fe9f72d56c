#include "backend/host_links.h"

#include <algorithm>
#include <utility>

#include "collectives/call.h"
#include "core/format.h"
#include "shm/whereabouts.h"

namespace torchtp::backend {
namespace {

using std::chrono::milliseconds;
using State = net::Mail::State;

constexpr milliseconds kLook{20};    // how often a wait looks after the group
constexpr int kLooksOfLongWait = 5;  // after so many a wait is told to the other ranks of this host
constexpr int kLooksBetweenSignals = shm::kBetweenSignals / kLook;
constexpr milliseconds kTellTime{300};  // for telling a cause, and for hearing it
constexpr milliseconds kGoodbyeTime{1000};

// The cause in an error of the host's group, without the group's title, which every rank adds itself.
std::string bare(const std::string& what, const std::string& title) {
  const std::string prefix = "torchtp " + title + ": ";
  return what.rfind(prefix, 0) == 0 ? what.substr(prefix.size()) : what;
}

std::vector<int> keys_of(const std::map<int, Fd>& connections) {
  std::vector<int> keys;
  for (const auto& [peer, socket] : connections) keys.push_back(peer);
  return keys;
}

std::vector<int> sockets_of(std::initializer_list<const std::map<int, Fd>*> every) {
  std::vector<int> sockets;
  for (const auto* connections : every) {
    for (const auto& [peer, socket] : *connections) sockets.push_back(socket.get());
  }
  return sockets;
}

}  // namespace

// One of the two.
struct HostLinks::Message {
  int peer;  // kAnyPeer: any
  net::Streams::MessagePtr stream;
  net::Mail::MessagePtr mail;
};

HostLinks::HostLinks(std::map<int, Fd> streams, std::map<int, Fd> mail, std::shared_ptr<shm::Group> host, int rank,
                     std::shared_ptr<ForkGuard> fork_guard)
    : host_(std::move(host)),
      rank_(rank),
      peers_(keys_of(mail)),
      sockets_(sockets_of({&streams, &mail})),
      fork_guard_(std::move(fork_guard)),
      mail_(rank, std::move(mail), collectives::describe_contents),
      streams_(std::move(streams)) {
  if (fork_guard_) fork_guard_->add(sockets_);
}

HostLinks::~HostLinks() {
  if (fork_guard_) fork_guard_->remove(sockets_);
  close("");
}

HostLinks::MessagePtr HostLinks::stream_to(int peer, const void* data, size_t num_bytes) {
  return std::make_shared<Message>(Message{peer, streams_.send(peer, data, num_bytes), nullptr});
}

HostLinks::MessagePtr HostLinks::stream_from(int peer, void* data, size_t num_bytes) {
  return std::make_shared<Message>(Message{peer, streams_.receive(peer, data, num_bytes), nullptr});
}

HostLinks::MessagePtr HostLinks::stream_from(int peer, size_t num_bytes, net::Streams::Arrived arrived) {
  return std::make_shared<Message>(Message{peer, streams_.receive(peer, num_bytes, std::move(arrived)), nullptr});
}

HostLinks::MessagePtr HostLinks::send(int peer, int tag, net::Mail::Memory data, Contents contents) {
  host_->check();
  return std::make_shared<Message>(Message{peer, nullptr, mail_.send(peer, tag, std::move(data), contents)});
}

HostLinks::MessagePtr HostLinks::receive(int peer, int tag, net::Mail::Memory data, Contents contents) {
  host_->check();
  return std::make_shared<Message>(Message{peer, nullptr, mail_.receive(peer, tag, std::move(data), contents)});
}

State HostLinks::look_at(const Message& message) {
  if (message.mail) return mail_.wait(*message.mail, kLook);
  switch (streams_.wait(*message.stream, kLook)) {
    case net::Streams::State::kDone:
      return State::kDone;
    case net::Streams::State::kLost:
      return State::kLost;
    default:
      return State::kUnderWay;
  }
}

bool HostLinks::is_under_way(const MessagePtr& message) {
  return mail_.wait(*message->mail, milliseconds(0)) == State::kUnderWay && !host_->aborted();
}

int HostLinks::wait(const MessagePtr& message, const Deadline& deadline, const std::string& call) {
  try {
    return wait_to_the_end(*message, deadline, call);
  } catch (...) {
    close_if_aborted();
    throw;
  }
}

int HostLinks::wait_to_the_end(const Message& message, const Deadline& deadline, const std::string& call) {
  shm::LongWait long_wait{host_->whereabouts(), *host_};
  for (int looks = 1;; ++looks) {
    const State state = look_at(message);
    if (state == State::kDone) break;
    host_->check();
    if (state == State::kFailed) fail(mail_.trouble(*message.mail));
    if (state == State::kLost) fail_lost(message, call);
    if (deadline.passed()) {
      fail(cat("timeout passed on rank ", rank_, " while it waited for ", name_of(message.peer), ", in ", call,
               is_elsewhere(message.peer) ? ": its network is down, its host is gone, or it is late" : ": it is late"));
    }
    if (looks % kLooksBetweenSignals == 0) host_->handle_signals([&] { return call; });
    if (looks == kLooksOfLongWait) long_wait.tell({call, message.peer < 0 ? "a rank" : cat("rank ", message.peer)});
  }
  long_wait.end();
  return message.mail ? mail_.source(*message.mail) : message.peer;
}

void HostLinks::fail_lost(const Message& message, const std::string& call) {
  const std::string trouble = message.mail ? mail_.trouble(*message.mail) : streams_.trouble(message.peer);
  int peer = message.peer;
  for (const int each : peers_) {
    if (peer < 0 && mail_.has_lost(each)) peer = each;
  }
  const std::string told = peer < 0 ? "" : mail_.goodbye_of(peer, kTellTime);
  host_->check();
  if (!told.empty()) fail(told);
  if (closed_) throw Error("the connections of the group have been closed");
  fail(cat("rank ", rank_, " lost the connection to ", name_of(peer), ", in ", call, ": ", trouble));
}

bool HostLinks::is_elsewhere(int peer) const { return peer < 0 || streams_.reaches(peer); }

std::string HostLinks::name_of(int peer) const {
  return peer < 0 ? "any rank" : cat("rank ", peer, is_elsewhere(peer) ? " on another host" : "");
}

void HostLinks::fail(const std::string& why) {
  host_->abort(why);
  host_->check();
  throw Error(why);
}

void HostLinks::part(const std::string& error) noexcept {
  if (!closed_ && !host_->aborted()) {
    mail_.say_goodbye(cat("rank ", rank_, " left the group", in_brackets(error)), kGoodbyeTime);
    const Deadline deadline(error.empty() ? kGoodbyeTime : kTellTime);  // who waits for this rank goes when it has gone
    for (const int peer : peers_) {
      if (deadline.passed()) break;
      mail_.goodbye_of(peer, std::chrono::duration_cast<milliseconds>(deadline.left()));
    }
  }
  close_if_aborted();
  close("");
}

void HostLinks::close_if_aborted() noexcept {
  try {
    if (host_->aborted()) host_->check();
  } catch (const std::exception& error) {
    close(bare(error.what(), host_->title()));
  }
}

void HostLinks::close(const std::string& cause) noexcept {
  if (closed_.exchange(true)) return;
  if (!cause.empty()) mail_.say_goodbye(cause, kTellTime);
  mail_.close();
  streams_.close();
}

}  // namespace torchtp::backend
