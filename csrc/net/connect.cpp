#include "net/connect.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <list>
#include <sstream>
#include <utility>
#include <vector>

#include "core/format.h"
#include "core/random.h"

namespace torchtp::net {
namespace {

constexpr size_t kTokenLength = 32;
constexpr std::array<char, 8> kMagic{'t', 'o', 'r', 'c', 'h', 't', 'p', '1'};
constexpr size_t kMostStrangers = 64;  // beside those who are awaited: who have knocked and not said enough
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);
constexpr auto kUntilCalledBack = std::chrono::seconds(1);  // as long as TCP waits before it knocks again
constexpr auto kUntilNoWay = std::chrono::seconds(3);
constexpr char kTaken = '!';
constexpr char kRemedy[] = "; the variable GLOO_SOCKET_IFNAME names the network interface that joins the hosts";

using Token = std::array<char, kTokenLength>;

// What the caller says; the other side answers with the caller's own token. Of two ranks that call each other the
// lower one decides which connection is taken: as the caller by one more byte, else by its answer.
struct Hello {
  std::array<char, 8> magic;
  int32_t from, to, use;
  Token token;  // of the door
};
static_assert(sizeof(Hello) == 52);

struct Introduction {
  std::string address;
  Token token;
};

Introduction read(const std::string& text) {
  std::string host, port, token;
  std::istringstream(text) >> host >> port >> token;
  if (token.size() != kTokenLength) throw Error(cat("'", text, "' does not introduce a rank"));
  Introduction read{cat(host, " ", port), {}};
  token.copy(read.token.data(), kTokenLength);
  return read;
}

// In a time that does not tell where they differ.
bool same(const Token& a, const Token& b) {
  unsigned char difference = 0;
  for (size_t i = 0; i < kTokenLength; ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

// A connection that has not proved itself.
struct Candidate {
  Fd socket;
  Line line;       // the peer is -1 until it has said who it is
  bool connected;  // what was called may still be on its way
  bool answered = false;
  std::array<char, sizeof(Hello) + sizeof(kTaken)> heard{};
  size_t num_heard = 0;
};

void prepare(const Fd& socket) {
  const int on = 1;  // small messages go at once
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// Up to `size` bytes altogether. False: the other side has hung up; errno tells how.
bool hear(Candidate& candidate, size_t size) {
  while (candidate.num_heard < size) {
    const ssize_t got =
        recv(candidate.socket.get(), candidate.heard.data() + candidate.num_heard, size - candidate.num_heard, 0);
    if (got == 0) {
      errno = ECONNRESET;
      return false;
    }
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    candidate.num_heard += static_cast<size_t>(got);
  }
  return true;
}

template <typename Value>
bool say(const Fd& socket, const Value& value) {  // into a socket that is still empty: all or nothing
  return send(socket.get(), &value, sizeof(value), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(value));
}

class Connecting {
 public:
  Connecting(int rank, const Token& token, const Fd& listener, const std::set<Line>& lines,
             const std::vector<std::string>& introductions)
      : rank_(rank), token_(token), listener_(listener), lines_(lines) {
    for (const Line& line : lines) known_[line.peer] = read(introductions.at(line.peer));
  }

  std::map<Line, Fd> run(const Deadline& deadline, const std::function<void()>& look) {
    const Deadline until_called_back(kUntilCalledBack), until_no_way(kUntilNoWay);
    Deadline next_look(kBetweenLooks);
    bool calls_back = false;
    for (const Line& line : lines_) {
      if (decides(line)) call(line);
    }
    while (made_.size() < lines_.size()) {
      std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
      for (const Candidate& each : candidates_) {
        entries.push_back({each.socket.get(), static_cast<short>(each.connected ? POLLIN : POLLOUT), 0});
      }
      const auto left = std::min(deadline.left(), next_look.left());
      const auto left_ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count();
      if (poll(entries.data(), entries.size(), static_cast<int>(left_ms + 1)) < 0 && errno != EINTR) {
        throw_errno("poll");
      }
      if (deadline.passed()) give_up();
      if (next_look.passed()) {
        look();
        next_look = Deadline(kBetweenLooks);
      }
      size_t index = 0;
      for (auto each = candidates_.begin(); each != candidates_.end();) {
        const bool ready = entries[++index].revents != 0;
        const auto next = std::next(each);
        if (ready && !(each->line.peer >= 0 ? go_on(*each) : listen_to(*each))) candidates_.erase(each);
        each = next;
      }
      if (entries[0].revents != 0) let_in();
      candidates_.remove_if([&](const Candidate& each) { return made_.count(each.line) != 0; });
      if (until_no_way.passed()) check_for_a_way();
      if (until_called_back.passed() && !std::exchange(calls_back, true)) {
        for (const Line& line : lines_) {
          if (!decides(line) && made_.count(line) == 0) call(line);
        }
      }
    }
    return std::move(made_);
  }

 private:
  bool decides(const Line& line) const { return rank_ < line.peer; }

  void call(const Line& line) {
    const Address address = Address::parse(known_.at(line.peer).address);
    Fd socket = Fd::tcp_socket(address.family());
    prepare(socket);
    if (::connect(socket.get(), address.get(), address.length) != 0 && errno != EINPROGRESS) {
      fail(line, std::strerror(errno));
    } else {
      candidates_.push_back({std::move(socket), line, false});
    }
  }

  // A call of this rank has come to nothing; the other one's may come yet.
  bool fail(const Line& line, const std::string& why) {
    failures_.emplace(line, why);
    return false;
  }

  std::string cannot_connect(int peer, const std::string& why) const {
    return cat("cannot connect to rank ", peer, " at ", known_.at(peer).address, ": ", why, kRemedy);
  }

  // Of those this rank called. False when nothing more is to be heard of it.
  bool go_on(Candidate& candidate) {
    if (made_.count(candidate.line) != 0) return false;
    const int peer = candidate.line.peer;
    const Introduction& known = known_.at(peer);
    if (!candidate.connected) {
      int error = 0;
      socklen_t length = sizeof(error);
      getsockopt(candidate.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      // Mostly because it has ended, which is to be heard of at once.
      if (error == ECONNREFUSED && decides(candidate.line)) {
        throw Unreachable(peer, cannot_connect(peer, std::strerror(error)));
      }
      if (error != 0) return fail(candidate.line, std::strerror(error));
      candidate.connected = true;
      const Hello hello{kMagic, rank_, peer, candidate.line.use, known.token};
      return say(candidate.socket, hello) || hung_up(candidate.line);
    }
    if (!hear(candidate, kTokenLength)) return hung_up(candidate.line);
    if (candidate.num_heard < kTokenLength) return true;
    Token answer;
    std::memcpy(answer.data(), candidate.heard.data(), answer.size());
    if (!same(answer, token_)) {
      const std::string who = cat("somebody else answers for rank ", peer, " at ", known.address);
      if (decides(candidate.line)) throw Error(cat(who, kRemedy));
      return fail(candidate.line, who);
    }
    if (decides(candidate.line) && !say(candidate.socket, kTaken)) return hung_up(candidate.line);
    made_[candidate.line] = std::move(candidate.socket);
    return false;
  }

  bool hung_up(const Line& line) {
    const std::string why = std::strerror(errno);
    if (decides(line)) throw Error(cannot_connect(line.peer, why));
    return fail(line, why);
  }

  // Some at a time: they may knock faster than they are let in, and the deadline has to be looked at.
  void let_in() {
    for (size_t i = 0; i < kMostStrangers; ++i) {
      Fd socket = Fd::accept(listener_, SOCK_NONBLOCK);
      if (!socket) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) throw_errno("accept");
        return;
      }
      prepare(socket);
      const auto is_stranger = [](const Candidate& each) { return each.line.peer < 0 && !each.answered; };
      const auto num_strangers = std::count_if(candidates_.begin(), candidates_.end(), is_stranger);
      if (static_cast<size_t>(num_strangers) >= lines_.size() + kMostStrangers) {
        candidates_.erase(std::find_if(candidates_.begin(), candidates_.end(), is_stranger));
      }
      candidates_.push_back({std::move(socket), {-1, 0}, true});
      // Before the next ones: who has said already what it must is not driven out by those who say nothing.
      if (!listen_to(candidates_.back())) candidates_.pop_back();
    }
  }

  // To who called this rank. Whoever says anything wrong is dropped without a word.
  bool listen_to(Candidate& candidate) {
    if (!hear(candidate, sizeof(Hello))) return false;
    if (candidate.num_heard < sizeof(Hello)) return true;
    Hello hello;
    std::memcpy(&hello, candidate.heard.data(), sizeof(hello));
    const Line line{hello.from, hello.use};
    if (!candidate.answered) {
      if (hello.magic != kMagic || hello.to != rank_ || !same(hello.token, token_)) return false;
      if (lines_.count(line) == 0 || made_.count(line) != 0) return false;
      if (!say(candidate.socket, known_.at(line.peer).token)) return false;
      candidate.answered = true;
    }
    if (!decides(line)) {
      if (!hear(candidate, candidate.heard.size())) return false;
      if (candidate.num_heard < candidate.heard.size()) return true;
      if (candidate.heard.back() != kTaken || made_.count(line) != 0) return false;
    }
    made_[line] = std::move(candidate.socket);
    return false;
  }

  // A rank that could call this one has done so by now.
  void check_for_a_way() const {
    for (const auto& [line, why] : failures_) {
      if (decides(line) && made_.count(line) == 0) {
        throw Unreachable(line.peer, cannot_connect(line.peer, cat(why, ", and it has not called either")));
      }
    }
  }

  [[noreturn]] void give_up() const {
    for (const Line& line : lines_) {
      if (made_.count(line) != 0) continue;
      const auto failure = failures_.find(line);
      if (failure != failures_.end()) {
        throw Error(cannot_connect(line.peer, cat(failure->second, ", and it had not called by the deadline")));
      }
      throw Error(cat("deadline passed while waiting for rank ", line.peer, " at ", known_.at(line.peer).address,
                      ", which has not called either", kRemedy));
    }
    throw Error("deadline passed");
  }

  const int rank_;
  const Token token_;
  const Fd& listener_;
  const std::set<Line>& lines_;
  std::map<int, Introduction> known_;
  std::list<Candidate> candidates_;
  std::map<Line, std::string> failures_;  // of this rank's calls
  std::map<Line, Fd> made_;
};

}  // namespace

Door::Door(const std::string& interfaces)
    : address_(own_address(interfaces)), token_(random_hex(kTokenLength / 2)), listener_(listen_at(address_)) {}

std::string Door::introduction() const { return cat(address_.text(), " ", token_); }

std::map<Line, Fd> Door::connect(int rank, const std::set<Line>& lines, const std::vector<std::string>& introductions,
                                 const Deadline& deadline, const std::function<void()>& look) const {
  Token token;
  token_.copy(token.data(), token.size());
  return Connecting(rank, token, listener_, lines, introductions).run(deadline, look);
}

}  // namespace torchtp::net
