#include "backend/host_links.h"

#include <ATen/ops/from_blob.h>

#include <cstring>
#include <utility>

#include "core/format.h"
#include "shm/whereabouts.h"

namespace torchtp::backend {
namespace {

using std::chrono::milliseconds;

constexpr size_t kCauseBytes = 2048;
constexpr milliseconds kLook{20};       // how often a wait is looked after
constexpr int kLooksOfLongWait = 5;     // after so many a wait is told to the other ranks of this host
constexpr milliseconds kTellTime{300};  // for telling a cause, and for hearing it
constexpr milliseconds kGoodbyeTime{1000};
constexpr milliseconds kForever = std::chrono::hours(24 * 365);  // our own deadlines count, not gloo's
constexpr int kParkAfter = 50;                                   // looks without anybody waiting

}  // namespace

struct HostLinks::Message {
  int peer;  // -1: any
  at::Tensor buffer;
  c10::intrusive_ptr<c10d::Work> work;  // of the inner backend; null for no bytes; goes before the memory
  net::Streams::MessagePtr stream;
};

struct HostLinks::Watched {
  c10d::Work& work;
  const Deadline& deadline;
  const std::string& call;
  const int peer;  // -1: any
  shm::LongWait long_wait;
  int looks = 0;
  bool late = false;
};

namespace {

std::string peer_name(int peer) { return peer < 0 ? "a rank" : cat("rank ", peer); }

}  // namespace

HostLinks::HostLinks(c10::intrusive_ptr<c10d::Backend> inner, std::unique_ptr<net::Streams> streams,
                     std::shared_ptr<shm::Group> host, int rank, const std::vector<int>& ranks)
    : host_(std::move(host)), rank_(rank), ranks_(ranks), streams_(std::move(streams)), inner_(std::move(inner)) {
  for (const int peer : ranks_) {
    std::vector<char>& text = causes_[peer];
    text.resize(kCauseBytes);
    cause_messages_[peer] = receive(peer, kCause, text.data(), text.size());
  }
}

HostLinks::~HostLinks() { close(""); }

HostLinks::MessagePtr HostLinks::post(int peer, int tag, void* data, size_t num_bytes, bool sends) {
  auto buffer = at::from_blob(data, {static_cast<int64_t>(num_bytes)}, at::TensorOptions().dtype(at::kByte));
  auto message = std::make_shared<Message>(Message{peer, std::move(buffer), nullptr, nullptr});
  if (num_bytes == 0) return message;
  std::vector<at::Tensor> list{message->buffer};
  std::string trouble;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (inner_) {
      try {
        message->work = sends      ? inner_->send(list, peer, tag)
                        : peer < 0 ? inner_->recvAnysource(list, tag)
                                   : inner_->recv(list, peer, tag);
        return message;
      } catch (const std::exception& error) {
        trouble = error.what();
      }
    }
  }
  host_->check();
  if (trouble.empty()) throw Error("the connections to other hosts have been closed");
  const std::string told = told_by(peer, kTellTime);
  fail(!told.empty() ? told
                     : cat("rank ", rank_, " lost the connection to rank ", peer, " on another host: ", trouble));
}

HostLinks::MessagePtr HostLinks::send(int peer, int tag, const void* data, size_t num_bytes) {
  return post(peer, tag, const_cast<void*>(data), num_bytes, true);
}

HostLinks::MessagePtr HostLinks::receive(int peer, int tag, void* data, size_t num_bytes) {
  return post(peer, tag, data, num_bytes, false);
}

HostLinks::MessagePtr HostLinks::receive_any(int tag, void* data, size_t num_bytes) {
  return post(-1, tag, data, num_bytes, false);
}

HostLinks::MessagePtr HostLinks::stream_to(int peer, const void* data, size_t num_bytes) {
  return std::make_shared<Message>(Message{peer, {}, nullptr, streams_->send(peer, data, num_bytes)});
}

HostLinks::MessagePtr HostLinks::stream_from(int peer, void* data, size_t num_bytes) {
  return std::make_shared<Message>(Message{peer, {}, nullptr, streams_->receive(peer, data, num_bytes)});
}

HostLinks::MessagePtr HostLinks::stream_from(int peer, size_t num_bytes, net::Streams::Arrived arrived) {
  return std::make_shared<Message>(Message{peer, {}, nullptr, streams_->receive(peer, num_bytes, std::move(arrived))});
}

int HostLinks::wait(const MessagePtr& message, const Deadline& deadline, const std::string& call) {
  if (message->stream) return wait_for_stream(*message, deadline, call);
  return message->work ? wait_for_inner(*message, deadline, call) : message->peer;  // of no bytes
}

int HostLinks::wait_for_stream(const Message& message, const Deadline& deadline, const std::string& call) {
  shm::LongWait long_wait{host_->whereabouts(), *host_};
  for (int looks = 1;; ++looks) {
    const net::Streams::State state = streams_->wait(*message.stream, kLook);
    if (state == net::Streams::State::kDone) break;
    host_->check();
    if (state == net::Streams::State::kLost) fail_lost(message.peer, call, streams_->trouble(message.peer));
    if (deadline.passed()) fail_late(message.peer, call);
    if (looks == kLooksOfLongWait) long_wait.tell({call, peer_name(message.peer)});
  }
  long_wait.end();
  return message.peer;
}

int HostLinks::wait_for_inner(const Message& message, const Deadline& deadline, const std::string& call) {
  Watched watched{*message.work, deadline, call, message.peer, {host_->whereabouts(), *host_}};
  std::list<Watched*>::iterator entry;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopping_) {
      lock.unlock();
      host_->check();
      throw Error("the connections to other hosts have been closed");
    }
    entry = watched_.insert(watched_.end(), &watched);
    if (!watcher_.joinable()) watcher_ = std::thread([this] { watch(); });
    if (parked_) changed_.notify_all();
  }
  bool done = false;
  std::string trouble;
  try {
    done = message.work->wait(kForever);
  } catch (const std::exception& error) {
    trouble = error.what();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.erase(entry);
  }
  if (done) {
    watched.long_wait.end();
    return message.peer >= 0 ? message.peer : message.work->sourceRank();
  }
  host_->check();
  if (watched.late) fail_late(message.peer, call);
  fail_lost(message.peer, call, trouble);
}

void HostLinks::fail_late(int peer, const std::string& call) {
  fail(cat("timeout passed on rank ", rank_, " while it waited for ", peer_name(peer), " on another host, in ", call,
           ": its network is down, its host is gone, or it is late"));
}

void HostLinks::fail_lost(int peer, const std::string& call, const std::string& trouble) {
  const std::string told = peer < 0 ? "" : told_by(peer, kTellTime);
  host_->check();
  if (!told.empty()) fail(told);
  if (trouble.empty()) throw Error("the connections to other hosts have been closed");
  fail(cat("rank ", rank_, " lost the connection to ", peer_name(peer), " on another host, in ", call, ": ", trouble));
}

// What a peer told before it ended the connection, if it could.
std::string HostLinks::told_by(int peer, milliseconds patience) {
  MessagePtr message;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = cause_messages_.find(peer);
    if (found == cause_messages_.end()) return "";
    message = std::move(found->second);
    cause_messages_.erase(found);
  }
  try {
    if (!message->work->wait(std::max(patience, milliseconds(1)))) return "";
  } catch (const std::exception&) {
    return "";
  }
  const auto* const text = static_cast<const char*>(message->buffer.const_data_ptr());
  return std::string(text, strnlen(text, kCauseBytes));
}

void HostLinks::fail(const std::string& why) {
  host_->abort(why);
  host_->check();
  throw Error(why);
}

// An inner backend's wait knows neither our deadlines nor the host's group, and one that times out spoils its group.
void HostLinks::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  int idle = 0;
  while (!stopping_) {
    idle = watched_.empty() ? idle + 1 : 0;
    if (idle > kParkAfter) {
      parked_ = true;
      changed_.wait(lock, [&] { return stopping_ || !watched_.empty(); });
      parked_ = false;
      continue;
    }
    changed_.wait_for(lock, kLook);
    for (Watched* const each : watched_) {
      each->late = each->late || each->deadline.passed();
      if (++each->looks == kLooksOfLongWait) each->long_wait.tell({each->call, peer_name(each->peer)});
      if (each->late || stopping_ || host_->aborted()) each->work.abort();
    }
  }
}

void HostLinks::tell(c10d::Backend& inner, const std::string& cause) const {
  std::vector<char> text(kCauseBytes);
  std::memcpy(text.data(), cause.data(), std::min(cause.size(), kCauseBytes - 1));
  const auto buffer =
      at::from_blob(text.data(), {static_cast<int64_t>(kCauseBytes)}, at::TensorOptions().dtype(at::kByte));
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const int peer : ranks_) {
    try {
      std::vector<at::Tensor> list{buffer};
      works.push_back(inner.send(list, peer, kCause));
    } catch (const std::exception&) {
      // that connection is gone
    }
  }
  const Deadline deadline(kTellTime);
  for (const auto& work : works) {
    try {
      work->wait(std::max(std::chrono::duration_cast<milliseconds>(deadline.left()), milliseconds(1)));
    } catch (const std::exception&) {
      // that rank does not listen
    }
  }
}

void HostLinks::part() noexcept {
  c10::intrusive_ptr<c10d::Backend> inner;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    inner = inner_;
  }
  if (inner && !host_->aborted()) {
    tell(*inner, cat("rank ", rank_, " left the group"));
    const Deadline deadline(kGoodbyeTime);
    for (const int peer : ranks_) {
      if (deadline.passed()) break;
      told_by(peer, std::chrono::duration_cast<milliseconds>(deadline.left()));
    }
  }
  inner.reset();
  close("");
}

void HostLinks::close(const std::string& cause) noexcept {
  c10::intrusive_ptr<c10d::Backend> inner;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    inner = std::move(inner_);
    if (!inner) return;
  }
  if (!cause.empty()) tell(*inner, cause);
  streams_->close();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    for (Watched* const each : watched_) each->work.abort();
    changed_.notify_all();
    cause_messages_.clear();
  }
  if (watcher_.joinable()) watcher_.join();
}

}  // namespace torchtp::backend
