#include "net/mail.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/format.h"

namespace torchtp::net {
namespace {

constexpr size_t kMostNotTaken = size_t{4} << 20;  // that eager messages to one peer may cost it
constexpr size_t kTellTaken = size_t{256} << 10;   // so much is worth a word
constexpr size_t kCostOfOne = 128;                 // beside its bytes
constexpr size_t kGoodbyeBytes = 2048;

Mail::Memory allocate(size_t num_bytes) {
  return Mail::Memory(static_cast<std::byte*>(::operator new(std::max<size_t>(num_bytes, 1))),
                      [](std::byte* memory) { ::operator delete(memory); });
}

}  // namespace

struct Mail::Message {
  bool is_send;
  int peer;  // of a receive kAnyPeer, until it is matched
  int tag;
  Memory data;
  Contents contents;
  State state;
  std::string trouble;
};

Mail::Mail(int rank, std::map<int, Fd> connections, DescribeContents describe) : rank_(rank), describe_(describe) {
  for (const auto& [peer, socket] : connections) peers_[peer];
  streams_ =
      std::make_unique<Streams>(std::move(connections), [this](int peer, const std::string& why) { lose(peer, why); });
  for (auto& [peer, state] : peers_) read_header(peer);
}

Mail::~Mail() { close(); }

Mail::MessagePtr Mail::send(int peer, int tag, Memory data, Contents contents) {
  auto message = std::make_shared<Message>(Message{true, peer, tag, std::move(data), contents, State::kUnderWay, ""});
  std::vector<Memory> ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  Peer& to = peers_.at(peer);
  if (is_lost(*message)) return message;
  const auto [num_bytes, dtype] = contents;
  if (num_bytes <= kEagerBytes && to.not_taken + kCostOfOne + num_bytes <= kMostNotTaken) {
    to.not_taken += kCostOfOne + num_bytes;
    Memory copy = allocate(num_bytes);  // the sender need not wait
    if (num_bytes > 0) std::memcpy(copy.get(), message->data.get(), num_bytes);
    post(peer, {Kind::kEager, dtype, tag, num_bytes, 0}, std::move(copy), num_bytes, nullptr);
    finish(message, peer);
    ended.swap(ended_);
  } else {
    const uint64_t number = to.next_offer++;
    to.offered[number] = message;
    post(peer, {Kind::kOffer, dtype, tag, num_bytes, number}, nullptr, 0, nullptr);
  }
  return message;
}

Mail::MessagePtr Mail::receive(int peer, int tag, Memory data, Contents contents) {
  auto message = std::make_shared<Message>(Message{false, peer, tag, std::move(data), contents, State::kUnderWay, ""});
  std::vector<Memory> ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto fits = [&](const Arrival& each) {
    return each.header.tag == tag && (peer == kAnyPeer || each.peer == peer);
  };
  const auto arrival = std::find_if(arrivals_.begin(), arrivals_.end(), fits);
  if (arrival == arrivals_.end()) {
    receives_.push_back(message);
  } else {
    const Arrival taken = std::move(*arrival);
    arrivals_.erase(arrival);
    take(message, taken);
    ended.swap(ended_);
  }
  return message;
}

// A receive has met what was sent.
void Mail::take(const MessagePtr& message, const Arrival& arrival) {
  message->peer = arrival.peer;
  const Header& header = arrival.header;
  const bool eager = header.kind == Kind::kEager;
  size_t& taken = peers_.at(arrival.peer).taken;
  if (eager) taken += kCostOfOne + header.num_bytes;
  if (taken >= kTellTaken) post(arrival.peer, {Kind::kTaken, 0, 0, std::exchange(taken, 0), 0}, nullptr, 0, nullptr);
  const Contents sent = contents_of(header);
  if (sent != message->contents) {
    const auto [num_bytes, dtype] = message->contents;
    if (!eager) post(arrival.peer, {Kind::kRefusal, dtype, 0, num_bytes, header.number}, nullptr, 0, nullptr);
    return fail(message, cat("rank ", rank_, " receives ", describe_(message->contents), " with tag ", message->tag,
                             " from rank ", arrival.peer, ", which sent ", describe_(sent)));
  }
  if (eager) {
    if (header.num_bytes > 0) std::memcpy(message->data.get(), arrival.bytes.get(), header.num_bytes);
    return finish(message, arrival.peer);
  }
  peers_.at(arrival.peer).asked[header.number] = message;
  post(arrival.peer, {Kind::kAsk, 0, 0, 0, header.number}, nullptr, 0, nullptr);
}

void Mail::arrived(int peer, const Header& header, Memory bytes) {
  const auto fits = [&](const MessagePtr& each) {
    return each->tag == header.tag && (each->peer == kAnyPeer || each->peer == peer);
  };
  Arrival arrival{peer, header, std::move(bytes)};
  const auto receive = std::find_if(receives_.begin(), receives_.end(), fits);
  if (receive == receives_.end()) {
    arrivals_.push_back(std::move(arrival));
  } else {
    const MessagePtr message = *receive;
    receives_.erase(receive);
    take(message, arrival);
  }
}

// One header and its payload, in this order. Called with the lock held, so that two do not mix.
void Mail::post(int peer, Header header, Memory payload, size_t num_bytes, MessagePtr finishes) {
  const auto head = std::make_shared<Header>(header);
  std::byte* const data = payload.get();
  const auto gone = [this, head, payload = std::move(payload), peer, finishes = std::move(finishes)] {
    const bool is_goodbye = head->kind == Kind::kGoodbye;
    if (!finishes && !is_goodbye) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (finishes) finish(finishes, peer);
      if (is_goodbye) ++num_goodbyes_sent_;
      changed_.notify_all();
    }
    give_back();
  };
  if (num_bytes == 0) return streams_->send(peer, head.get(), sizeof(Header), gone);
  streams_->send(peer, head.get(), sizeof(Header), [head] {});
  streams_->send(peer, data, num_bytes, gone);
}

void Mail::give_back() {
  std::vector<Memory> ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  ended.swap(ended_);
}

Mail::MessagePtr Mail::take_out(std::map<uint64_t, MessagePtr>& messages, uint64_t number) {
  const auto found = messages.find(number);
  if (found == messages.end()) return nullptr;
  MessagePtr message = std::move(found->second);
  messages.erase(found);
  return message;
}

void Mail::read_header(int peer) {
  give_back();
  streams_->receive(peer, &peers_.at(peer).header, sizeof(Header), [this, peer] { take_header(peer); });
}

// On the thread of the streams. What a peer says is checked before it is used; who says nonsense is lost.
void Mail::take_header(int peer) {
  std::unique_lock<std::mutex> lock(mutex_);
  Peer& from = peers_.at(peer);
  const Header header = from.header;
  const auto nonsense = [&] {
    lock.unlock();
    lose(peer, "what it sent makes no sense");
  };
  switch (header.kind) {
    case Kind::kEager: {
      if (header.num_bytes > kEagerBytes) return nonsense();
      if (header.num_bytes == 0) {
        arrived(peer, header, nullptr);
        break;
      }
      const Memory bytes = allocate(header.num_bytes);
      return streams_->receive(peer, bytes.get(), header.num_bytes, [this, peer, header, bytes] {
        {
          const std::lock_guard<std::mutex> hold(mutex_);
          arrived(peer, header, bytes);
        }
        read_header(peer);
      });
    }
    case Kind::kOffer:
      if (header.number != from.next_offered++) return nonsense();
      arrived(peer, header, nullptr);
      break;
    case Kind::kAsk: {
      const MessagePtr message = take_out(from.offered, header.number);
      if (!message) return nonsense();
      const size_t num_bytes = message->contents.num_bytes;
      post(peer, {Kind::kData, 0, 0, num_bytes, header.number}, message->data, num_bytes, message);
      break;
    }
    case Kind::kRefusal: {
      const MessagePtr message = take_out(from.offered, header.number);
      if (!message) return nonsense();
      fail(message, cat("rank ", peer, " receives ", describe_(contents_of(header)), " with tag ", message->tag,
                        " from rank ", rank_, ", which sent ", describe_(message->contents)));
      break;
    }
    case Kind::kData: {
      const MessagePtr message = take_out(from.asked, header.number);
      if (!message || header.num_bytes != message->contents.num_bytes) return nonsense();
      if (header.num_bytes == 0) {
        finish(message, peer);
        break;
      }
      return streams_->receive(peer, message->data.get(), message->contents.num_bytes, [this, peer, message] {
        {
          const std::lock_guard<std::mutex> hold(mutex_);
          finish(message, peer);
        }
        read_header(peer);
      });
    }
    case Kind::kTaken:
      if (header.num_bytes > from.not_taken) return nonsense();
      from.not_taken -= header.num_bytes;
      break;
    case Kind::kGoodbye: {
      if (header.num_bytes > kGoodbyeBytes) return nonsense();
      if (header.num_bytes == 0) {
        from.goodbye = "";
        changed_.notify_all();
        break;
      }
      const Memory bytes = allocate(header.num_bytes);
      return streams_->receive(peer, bytes.get(), header.num_bytes, [this, peer, bytes, size = header.num_bytes] {
        {
          const std::lock_guard<std::mutex> hold(mutex_);
          std::string text(reinterpret_cast<const char*>(bytes.get()), size);
          const auto is_print = [](char letter) { return letter >= ' ' && letter <= '~'; };
          std::replace_if(text.begin(), text.end(), [&](char letter) { return !is_print(letter); }, '?');
          peers_.at(peer).goodbye = std::move(text);
          changed_.notify_all();
        }
        read_header(peer);
      });
    }
    default:
      return nonsense();
  }
  lock.unlock();
  read_header(peer);
}

void Mail::finish(const MessagePtr& message, int source) {
  message->peer = source;
  message->state = State::kDone;
  ended_.push_back(std::move(message->data));
  changed_.notify_all();
}

void Mail::fail(const MessagePtr& message, const std::string& why) {
  message->state = State::kFailed;
  message->trouble = why;
  ended_.push_back(std::move(message->data));
  changed_.notify_all();
}

void Mail::lose(int peer, const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Peer& from = peers_.at(peer);
  if (from.lost) return;
  from.lost = true;
  from.why = why;
  changed_.notify_all();
}

// A receive from anybody goes on while somebody is left, unless one has gone without a word.
bool Mail::is_lost(const Message& message) const {
  if (closed_) return true;
  if (message.peer != kAnyPeer) return peers_.at(message.peer).lost;
  size_t num_lost = 0;
  for (const auto& [peer, state] : peers_) {
    if (!state.lost) continue;
    ++num_lost;
    if (!state.goodbye) return true;
  }
  return num_lost == peers_.size();
}

Mail::State Mail::wait(const Message& message, std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return message.state != State::kUnderWay || is_lost(message); });
  if (message.state != State::kUnderWay) return message.state;
  return is_lost(message) ? State::kLost : State::kUnderWay;
}

int Mail::source(const Message& message) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return message.peer;
}

std::string Mail::trouble(const Message& message) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!message.trouble.empty()) return message.trouble;
  for (const auto& [peer, state] : peers_) {
    if ((peer == message.peer || message.peer == kAnyPeer) && state.lost) return state.why;
  }
  return closed_ ? "it was closed by this rank" : "";
}

void Mail::say_goodbye(const std::string& why, std::chrono::milliseconds patience) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) return;
  const size_t num_bytes = std::min(why.size(), kGoodbyeBytes);
  const Memory text = allocate(num_bytes);
  std::memcpy(text.get(), why.data(), num_bytes);
  const size_t expected = num_goodbyes_sent_;
  size_t num_told = 0;
  for (const auto& [peer, state] : peers_) {
    if (state.lost) continue;
    ++num_told;
    post(peer, {Kind::kGoodbye, 0, 0, num_bytes, 0}, text, num_bytes, nullptr);
  }
  changed_.wait_for(lock, patience, [&] {
    const auto is_gone = [](const auto& each) { return each.second.lost; };
    const size_t num_gone = static_cast<size_t>(std::count_if(peers_.begin(), peers_.end(), is_gone));
    return closed_ || num_goodbyes_sent_ - expected + num_gone >= peers_.size() ||
           num_goodbyes_sent_ - expected >= num_told;
  });
}

std::string Mail::goodbye_of(int peer, std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  const Peer& from = peers_.at(peer);
  changed_.wait_for(lock, patience, [&] { return from.goodbye || from.lost || closed_; });
  return from.goodbye.value_or("");
}

bool Mail::has_lost(int peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Peer& from = peers_.at(peer);
  return from.lost && !from.goodbye;
}

void Mail::close() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(closed_, true)) return;
    changed_.notify_all();
  }
  streams_->close();
}

}  // namespace torchtp::net
