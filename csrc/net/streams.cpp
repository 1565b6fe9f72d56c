#include "net/streams.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "core/format.h"

namespace torchtp::net {
namespace {

constexpr size_t kMostAtOnce = size_t{1} << 20;  // bytes of one system call: then the other connections have their turn

}  // namespace

// What is posted.
struct Streams::Item {
  std::byte* data = nullptr;
  size_t num_bytes = 0;
  Arrived arrived;
  Done finished;
  size_t moved = 0;
  bool done = false;
  bool awaited = false;  // somebody sleeps until it is done
};

struct Streams::Connection {
  int peer = -1;
  Fd socket;
  std::deque<std::shared_ptr<Item>> sends, receives;
  // As far as known; edges of epoll set them, the end of what the socket takes or has clears them.
  bool writable = true, readable = true;
  bool hung_up = false;         // reading goes on to the end
  std::string deaf;             // why the peer takes no more; what it has said before is read to the end
  std::string trouble;          // why it is lost; empty while it is not
  std::vector<std::byte> part;  // of what arrives for Arrived
};

struct Streams::Shared {
  explicit Shared(Lost tell) : lost(std::move(tell)) {}

  const Lost lost;
  std::mutex mutex;                  // of all below, and of items
  std::condition_variable changed;   // an item is done or lost
  std::condition_variable put_down;  // `held` has changed
  std::map<int, Connection> connections;
  std::vector<int> untold;                     // whose connections are lost
  std::vector<std::shared_ptr<Item>> dropped;  // and what was under way there; given back without the lock
  const Item* held = nullptr;                  // whose memory the thread reads or writes now
  bool asleep = false;                         // the thread: whoever has something for it rings
  bool rung = false;                           // since the thread last began to look through the queues
  bool stopping = false;
  const Fd epoll = Fd::epoll();
  const Fd wake = Fd::event();

  void lose(Connection& connection, const std::string& why);
  void run();
  bool step(Connection& connection, bool sends, std::unique_lock<std::mutex>& lock);
  void tell_losses(std::unique_lock<std::mutex>& lock);
  void wait_for_events();
  void ring();
};

class Streams::Message {
 public:
  Message(std::shared_ptr<Shared> owner, int to_or_from, bool is_send, std::shared_ptr<Item> posted)
      : shared(std::move(owner)), peer(to_or_from), sends(is_send), item(std::move(posted)) {}
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  ~Message() {
    std::unique_lock<std::mutex> lock(shared->mutex);
    shared->put_down.wait(lock, [&] { return shared->held != item.get(); });
    if (item->done) return;
    Connection& connection = shared->connections.at(peer);
    auto& queue = sends ? connection.sends : connection.receives;
    const auto place = std::find(queue.begin(), queue.end(), item);
    if (place == queue.end()) return;  // lost
    queue.erase(place);
    shared->lose(connection, "a message was given up");
    shared->ring();
  }

  const std::shared_ptr<Shared> shared;
  const int peer;
  const bool sends;
  const std::shared_ptr<Item> item;
};

void Streams::Shared::lose(Connection& connection, const std::string& why) {
  if (!connection.trouble.empty()) return;
  connection.trouble = why;
  for (auto* const queue : {&connection.sends, &connection.receives}) {
    dropped.insert(dropped.end(), queue->begin(), queue->end());
    queue->clear();
  }
  untold.push_back(connection.peer);
  shutdown(connection.socket.get(), SHUT_RDWR);  // a forked child may hold the socket, too
  changed.notify_all();
}

// One system call, and what it brings. False when there is nothing to do for now.
bool Streams::Shared::step(Connection& connection, bool sends, std::unique_lock<std::mutex>& lock) {
  auto& queue = sends ? connection.sends : connection.receives;
  bool& ready = sends ? connection.writable : connection.readable;
  if (!sends && queue.empty() && !connection.deaf.empty()) lose(connection, connection.deaf);
  if (queue.empty() || !ready || (sends && !connection.deaf.empty())) return false;
  const std::shared_ptr<Item> front = queue.front();
  Item& message = *front;
  std::byte* place = message.data + message.moved;
  size_t most = std::min(message.num_bytes - message.moved, kMostAtOnce);
  const size_t in_part = message.moved % kPartBytes;
  if (message.arrived) {
    connection.part.resize(kPartBytes);
    place = connection.part.data() + in_part;
    most = std::min(most, kPartBytes - in_part);
  }
  held = &message;
  lock.unlock();
  const int socket = connection.socket.get();
  const ssize_t moved = sends ? ::send(socket, place, most, MSG_NOSIGNAL) : ::recv(socket, place, most, 0);
  const int error = errno;
  const size_t now = moved > 0 ? static_cast<size_t>(moved) : 0;
  const bool is_last = message.moved + now == message.num_bytes;
  if (message.arrived && now > 0 && (is_last || in_part + now == kPartBytes)) {
    message.arrived(connection.part.data(), message.moved - in_part, in_part + now);
  }
  lock.lock();
  held = nullptr;
  put_down.notify_all();
  if (moved < 0 && error == EINTR) return true;
  if (moved < 0 && (error == EAGAIN || error == EWOULDBLOCK)) {
    ready = false;
    return false;
  }
  if (moved <= 0) {
    const std::string why = moved == 0 ? "it was closed by the other side" : std::strerror(error);
    if (sends && (error == EPIPE || error == ECONNRESET) && !connection.receives.empty()) {
      connection.deaf = why;
      connection.readable = true;  // the error is no edge of epoll
      return true;
    }
    lose(connection, connection.deaf.empty() ? why : connection.deaf);
    return false;
  }
  if (now < most && !connection.hung_up) ready = false;  // an edge tells when there is more
  message.moved += now;
  if (!is_last || queue.empty()) return true;
  message.done = true;
  queue.pop_front();
  if (!message.finished) {
    if (message.awaited) changed.notify_all();
    return true;
  }
  // What it holds may be a tensor of Python's, whose lock must not be waited for under ours.
  Done finished = std::move(message.finished);
  lock.unlock();
  finished();
  finished = nullptr;
  lock.lock();
  return true;
}

void Streams::Shared::tell_losses(std::unique_lock<std::mutex>& lock) {
  if (!dropped.empty()) {
    auto given_back = std::move(dropped);
    dropped.clear();
    lock.unlock();
    given_back.clear();
    lock.lock();
  }
  while (!untold.empty() && !stopping) {
    const int peer = untold.back();
    untold.pop_back();
    const std::string why = connections.at(peer).trouble;
    lock.unlock();
    if (lost) lost(peer, why);
    lock.lock();
  }
}

void Streams::Shared::ring() {
  rung = true;
  if (!std::exchange(asleep, false)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake.get(), &one, sizeof(one));
}

void Streams::Shared::wait_for_events() {
  std::array<epoll_event, 64> events;
  const int found = epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), -1);
  for (int i = 0; i < found; ++i) {
    if (events[i].data.ptr == nullptr) {
      uint64_t count;
      [[maybe_unused]] const ssize_t read = ::read(wake.get(), &count, sizeof(count));
      continue;
    }
    Connection& connection = *static_cast<Connection*>(events[i].data.ptr);
    const bool ends = events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
    connection.hung_up |= ends;
    connection.writable |= ends || (events[i].events & EPOLLOUT);
    connection.readable |= ends || (events[i].events & EPOLLIN);
  }
}

void Streams::Shared::run() {
  std::unique_lock<std::mutex> lock(mutex);
  while (!stopping) {
    bool moved = rung = false;
    for (auto& [peer, connection] : connections) {
      moved |= step(connection, true, lock);
      moved |= step(connection, false, lock);
    }
    tell_losses(lock);
    if (moved || rung || stopping) continue;  // who rang while the lock was not held has seen the thread awake
    asleep = true;
    lock.unlock();
    wait_for_events();
    lock.lock();
    asleep = false;
  }
}

Streams::Streams(std::map<int, Fd> connections, Lost lost) : shared_(std::make_shared<Shared>(std::move(lost))) {
  const auto watch = [&](const Fd& fd, uint32_t what, void* pointer) {
    epoll_event event{};
    event.events = what;
    event.data.ptr = pointer;
    if (epoll_ctl(shared_->epoll.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0) throw_errno("epoll_ctl");
  };
  watch(shared_->wake, EPOLLIN, nullptr);
  for (auto& [peer, socket] : connections) {
    Connection& made = shared_->connections[peer];
    made.peer = peer;
    made.socket = std::move(socket);
    watch(made.socket, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, &made);
  }
  thread_ = std::thread([shared = shared_] { shared->run(); });
}

Streams::~Streams() { close(); }

bool Streams::reaches(int peer) const { return shared_->connections.count(peer) != 0; }

std::shared_ptr<Streams::Item> Streams::post(int peer, bool sends, Item item) {
  const auto posted = std::make_shared<Item>(std::move(item));
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  Connection& connection = shared_->connections.at(peer);
  posted->done = posted->num_bytes == 0;
  if (posted->done || !connection.trouble.empty()) return posted;
  (sends ? connection.sends : connection.receives).push_back(posted);
  shared_->ring();
  return posted;
}

Streams::MessagePtr Streams::hand_out(int peer, bool sends, Item item) {
  return std::make_shared<Message>(shared_, peer, sends, post(peer, sends, std::move(item)));
}

namespace {

std::byte* bytes_at(const void* data) { return static_cast<std::byte*>(const_cast<void*>(data)); }

}  // namespace

Streams::MessagePtr Streams::send(int peer, const void* data, size_t num_bytes) {
  return hand_out(peer, true, {bytes_at(data), num_bytes, nullptr, nullptr});
}

Streams::MessagePtr Streams::receive(int peer, void* data, size_t num_bytes) {
  return hand_out(peer, false, {bytes_at(data), num_bytes, nullptr, nullptr});
}

Streams::MessagePtr Streams::receive(int peer, size_t num_bytes, Arrived arrived) {
  return hand_out(peer, false, {nullptr, num_bytes, std::move(arrived), nullptr});
}

void Streams::send(int peer, const void* data, size_t num_bytes, Done done) {
  post(peer, true, {bytes_at(data), num_bytes, nullptr, std::move(done)});
}

void Streams::receive(int peer, void* data, size_t num_bytes, Done done) {
  post(peer, false, {bytes_at(data), num_bytes, nullptr, std::move(done)});
}

Streams::State Streams::wait(const Message& message, std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  const Connection& connection = shared_->connections.at(message.peer);
  message.item->awaited = true;
  shared_->changed.wait_for(lock, patience, [&] { return message.item->done || !connection.trouble.empty(); });
  return message.item->done ? State::kDone : connection.trouble.empty() ? State::kUnderWay : State::kLost;
}

std::string Streams::trouble(int peer) const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->connections.at(peer).trouble;
}

void Streams::close() noexcept {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->stopping = true;
    for (auto& [peer, connection] : shared_->connections) shared_->lose(connection, "it was closed by this rank");
    shared_->ring();
  }
  if (thread_.joinable()) thread_.join();
  std::vector<std::shared_ptr<Item>> given_back;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  given_back.swap(shared_->dropped);
}

}  // namespace torchtp::net
