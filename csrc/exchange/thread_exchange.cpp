#include "exchange/thread_exchange.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "core/format.h"

namespace torchtp::exchange {

namespace {

struct Message {
  uint64_t ticket;
  uint32_t layout;
  std::vector<std::byte> bytes;
};

}  // namespace

class ThreadHub {
 public:
  ThreadHub(int size, std::chrono::milliseconds timeout) : size_(size), timeout_(timeout) {}

  int size() const { return size_; }

  void put(int from, int to, Message message) {
    std::lock_guard<std::mutex> lock(mutex_);
    check();
    queues_[{from, to}].push_back(std::move(message));
    changed_.notify_all();
  }

  Message take(int from, int to, const std::string& what) {
    std::unique_lock<std::mutex> lock(mutex_);
    check();
    auto& queue = queues_[{from, to}];
    const bool came =
        changed_.wait_for(lock, timeout_, [&] { return !queue.empty() || !cause_.empty() || left_[from]; });
    if (queue.empty()) {
      check();
      stop(!came ? cat("timeout of ", timeout_.count(), " ms passed on rank ", to, " while it waited ", what)
                 : cat("rank ", from, " left the group while rank ", to, " waited ", what));
      throw Error(cause_);
    }
    Message message = std::move(queue.front());
    queue.pop_front();
    return message;
  }

  [[noreturn]] void fail(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    stop(why);
    throw Error(cause_);
  }

  void abort(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    stop(why);
  }

  void leave(int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    left_[rank] = true;
    changed_.notify_all();
  }

 private:
  void stop(const std::string& why) {
    if (cause_.empty()) cause_ = why;
    changed_.notify_all();
  }

  void check() const {
    if (!cause_.empty()) throw Error(cause_);
  }

  const int size_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<Message>> queues_;  // (from, to)
  std::map<int, bool> left_;
  std::string cause_;
};

std::shared_ptr<ThreadHub> make_thread_hub(int size, std::chrono::milliseconds timeout) {
  return std::make_shared<ThreadHub>(size, timeout);
}

struct ThreadExchange::State {
  uint64_t last_ticket = 0;
  std::map<uint64_t, std::vector<Receive>> tickets;  // receives by ascending peer
};

ThreadExchange::ThreadExchange(std::shared_ptr<ThreadHub> hub, int rank)
    : hub_(std::move(hub)), rank_(rank), state_(std::make_unique<State>()) {}

ThreadExchange::~ThreadExchange() { hub_->leave(rank_); }

int ThreadExchange::size() const { return hub_->size(); }

uint64_t ThreadExchange::start(std::vector<Send> sends, std::vector<Receive> receives) {
  const uint64_t ticket = ++state_->last_ticket;
  std::stable_sort(receives.begin(), receives.end(),
                   [](const Receive& a, const Receive& b) { return a.peer < b.peer; });
  state_->tickets[ticket] = std::move(receives);
  for (const Send& send : sends) {
    Message message{ticket, send.layout, std::vector<std::byte>(send.num_bytes)};
    if (send.num_bytes > 0) send.source->read(0, message.bytes.data(), send.num_bytes);
    hub_->put(rank_, send.peer, std::move(message));
  }
  return ticket;
}

// Earlier exchanges come first, so that each one's sinks are written in the order of peers.
void ThreadExchange::finish(uint64_t ticket) {
  if (state_->tickets.count(ticket) == 0) throw Error(cat("no exchange ", ticket, " is under way"));
  std::vector<std::vector<Receive>> done;  // sinks go at the very end: they may come back to us
  for (auto& [number, receives] : state_->tickets) {
    if (number > ticket) break;
    for (Receive& receive : receives) complete(number, receive);
    done.push_back(std::exchange(receives, {}));
  }
  state_->tickets.erase(ticket);
}

void ThreadExchange::complete(uint64_t ticket, Receive& receive) {
  const Message message = hub_->take(
      receive.peer, rank_, cat("in exchange ", ticket, " for ", receive.num_bytes, " bytes from rank ", receive.peer));
  if (message.ticket != ticket || message.bytes.size() != receive.num_bytes) {
    hub_->fail(cat("rank ", rank_, " expects ", receive.num_bytes, " bytes from rank ", receive.peer, " (exchange #",
                   ticket, "), but rank ", receive.peer, " sent ", message.bytes.size(), " bytes (exchange #",
                   message.ticket, ")"));
  }
  if (receive.num_bytes > 0) receive.sink->write(message.layout, 0, message.bytes.data(), receive.num_bytes);
}

void ThreadExchange::abort(const std::string& why) { hub_->abort(why); }

}  // namespace torchtp::exchange
