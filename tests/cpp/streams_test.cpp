// What the streams between ranks carry, all of them over loopback. Real hosts: tests/test_hosts.py.
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "doors.h"
#include "net/streams.h"
#include "ranks.h"

using torchtp::Deadline;
using torchtp::Fd;
using torchtp::shm::Bootstrap;
using namespace torchtp::net;
using namespace torchtp::test;

namespace {

using std::chrono::milliseconds;

std::unique_ptr<Streams> connect(Bootstrap& bootstrap) { return std::make_unique<Streams>(connections(bootstrap, 2)); }

void finish(Streams& streams, const Streams::MessagePtr& message) {
  const Deadline deadline(kSoon);
  while (!deadline.passed()) {
    const Streams::State state = streams.wait(*message, milliseconds(1000));
    CHECK(state != Streams::State::kLost);
    if (state == Streams::State::kDone) return;
  }
  CHECK(!"done in time");
}

void until_lost(Streams& streams, const Streams::MessagePtr& message) {
  const Deadline deadline(kSoon);
  Streams::State state = Streams::State::kUnderWay;
  while (state == Streams::State::kUnderWay && !deadline.passed()) state = streams.wait(*message, milliseconds(1000));
  CHECK(state == Streams::State::kLost);
}

std::byte value_at(int from, int to, int message, size_t i) {
  return static_cast<std::byte>(from * 37 + to * 101 + message * 7 + static_cast<int>(i * 13 + i / 251));
}

// Everybody sends everybody messages of any length, with several under way; half arrive in parts.
void everybody_to_everybody(int size) {
  constexpr int kMessages = 24;
  run_threads(size, [&](Bootstrap& bootstrap) {
    const auto streams = connect(bootstrap);
    const int me = bootstrap.rank();
    std::mt19937 both(5);  // the same on all ranks
    std::vector<std::vector<std::byte>> memory;
    std::vector<Streams::MessagePtr> messages;
    std::vector<std::shared_ptr<std::vector<size_t>>> parts;
    struct Check {
      int from, message;
      size_t memory;
    };
    std::vector<Check> checks;
    for (int k = 0; k < kMessages; ++k) {
      for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
          const uint32_t kind = both();
          const size_t num_bytes = kind % 5 == 0 ? 0 : kind % 5 < 3 ? kind % 3000 : kind % 3'000'000;
          const bool in_parts = both() % 2 == 0;
          if (from == to || (from != me && to != me)) continue;
          std::vector<std::byte>& bytes = memory.emplace_back(num_bytes);
          if (from == me) {
            for (size_t i = 0; i < num_bytes; ++i) bytes[i] = value_at(from, to, k, i);
            messages.push_back(streams->send(to, bytes.data(), num_bytes));
          } else if (in_parts) {
            std::byte* const place = bytes.data();
            auto expected = parts.emplace_back(std::make_shared<std::vector<size_t>>());
            messages.push_back(streams->receive(from, num_bytes,
                                                [place, expected](const std::byte* part, size_t offset, size_t count) {
                                                  expected->push_back(offset);
                                                  std::memcpy(place + offset, part, count);
                                                }));
            checks.push_back({from, k, memory.size() - 1});
          } else {
            messages.push_back(streams->receive(from, bytes.data(), num_bytes));
            checks.push_back({from, k, memory.size() - 1});
          }
        }
      }
    }
    for (const auto& message : messages) finish(*streams, message);
    for (const Check& check : checks) {
      const auto& bytes = memory[check.memory];
      for (size_t i = 0; i < bytes.size(); ++i) {
        if (bytes[i] != value_at(check.from, me, check.message, i)) CHECK(!"the bytes that were sent");
      }
    }
    for (const auto& offsets : parts) {
      for (size_t i = 0; i < offsets->size(); ++i) CHECK_EQUAL((*offsets)[i], i * Streams::kPartBytes);
    }
    bootstrap.all_gather("");
  });
}

void a_peer_that_goes_is_a_lost_message() {
  run_threads(3, [](Bootstrap& bootstrap) {
    auto streams = connect(bootstrap);
    if (bootstrap.rank() == 1) {
      const int last = 5;
      const auto sent = streams->send(0, &last, sizeof(last));
      finish(*streams, sent);
      streams.reset();
      bootstrap.all_gather("");
      return;
    }
    if (bootstrap.rank() == 0) {
      int first = 0, second = 0;
      const auto one = streams->receive(1, &first, sizeof(first)), two = streams->receive(1, &second, sizeof(second));
      until_lost(*streams, two);
      finish(*streams, one);  // what was sent before arrives
      CHECK_EQUAL(first, 5);
      CHECK_CONTAINS(streams->trouble(1), "closed by the other side");
      std::vector<std::byte> much(64 << 20);
      until_lost(*streams, streams->send(1, much.data(), much.size()));
    }
    bootstrap.all_gather("");
    int word = 7;  // the others go on
    if (bootstrap.rank() == 0) {
      finish(*streams, streams->send(2, &word, sizeof(word)));
    } else {
      word = 0;
      finish(*streams, streams->receive(0, &word, sizeof(word)));
      CHECK_EQUAL(word, 7);
    }
  });
}

// A peer that fails says why and goes, and this rank may be about to send to it.
void the_last_words_of_a_peer_are_heard_by_who_sends_to_it() {
  run_threads(2, [](Bootstrap& bootstrap) {
    constexpr char kWords[] = "farewell";
    auto sockets = connections(bootstrap, 2);
    if (bootstrap.rank() == 1) {
      Fd socket = std::move(sockets.at(0));
      bootstrap.all_gather("rank 0 has sent");
      CHECK_EQUAL(send(socket.get(), "!", 1, 0), 1);
      bootstrap.all_gather("the thread is held");
      CHECK_EQUAL(send(socket.get(), kWords, sizeof(kWords), 0), sizeof(kWords));
      socket = Fd();  // with bytes that it has not read: the other side's next send fails
      bootstrap.all_gather("gone");
      return;
    }
    Streams streams(std::move(sockets));
    char byte = 0, words[sizeof(kWords)] = {};
    finish(streams, streams.send(1, &byte, 1));
    std::atomic<bool> held{false}, go{false};
    streams.receive(1, &byte, 1, [&] {
      held = true;
      while (!go) std::this_thread::yield();
    });
    bootstrap.all_gather("rank 0 has sent");
    while (!held) std::this_thread::yield();
    bootstrap.all_gather("the thread is held");
    bootstrap.all_gather("gone");
    const auto last = streams.receive(1, words, sizeof(words)), more = streams.receive(1, &byte, 1);
    const auto sent = streams.send(1, kWords, sizeof(kWords));
    go = true;
    finish(streams, last);
    CHECK_EQUAL(std::string(words), kWords);
    until_lost(streams, more);
    until_lost(streams, sent);
  });
}

void a_message_given_up_ends_its_connection() {
  run_threads(2, [](Bootstrap& bootstrap) {
    const auto streams = connect(bootstrap);
    std::vector<std::byte> much(32 << 20);
    if (bootstrap.rank() == 0) {
      auto half = std::make_unique<std::vector<std::byte>>(33 << 20);  // more than comes
      auto message = streams->receive(1, half->data(), half->size());
      streams->wait(*message, milliseconds(1));
      message.reset();
      half.reset();  // nothing is written here any more
      until_lost(*streams, streams->receive(1, much.data(), 1));
      CHECK_CONTAINS(streams->trouble(1), "given up");
    } else {
      auto one = streams->send(0, much.data(), much.size());
      until_lost(*streams, streams->receive(0, much.data(), 1));
    }
    bootstrap.all_gather("");
  });
}

void waiting_ends_with_close() {
  run_threads(2, [](Bootstrap& bootstrap) {
    const auto streams = connect(bootstrap);
    int word = 0;
    const auto message = streams->receive(1 - bootstrap.rank(), &word, sizeof(word));
    CHECK(streams->wait(*message, milliseconds(1)) == Streams::State::kUnderWay);
    bootstrap.all_gather("");  // else the other side may have closed already
    std::thread other([&] { streams->close(); });
    until_lost(*streams, message);
    other.join();
    bootstrap.all_gather("");
  });
}

// Whoever has been told that something has come posts an answer just when the thread looks for more and finds nothing.
void a_message_posted_while_the_thread_looks_is_sent() {
  constexpr int kRounds = 20'000;
  run_threads(2, [](Bootstrap& bootstrap) {
    const int other = 1 - bootstrap.rank();
    std::atomic<int> num_come{0};
    int word = -1;
    const auto streams = connect(bootstrap);
    std::function<void()> listen = [&] {
      streams->receive(other, &word, sizeof(word), [&] {
        listen();
        num_come.fetch_add(1, std::memory_order_release);
      });
    };
    listen();
    for (int i = 0; i < kRounds; ++i) {
      const Deadline deadline(kSoon);
      const auto sent = streams->send(other, &i, sizeof(i));
      for (int looks = 0; num_come.load(std::memory_order_acquire) <= i; ++looks) {
        if (looks < 2000) continue;  // who sleeps comes too late; who never does keeps the others waiting
        CHECK(!deadline.passed());
        std::this_thread::yield();
      }
      for (volatile int k = 0; k < i % 499; ++k) {
      }
      finish(*streams, sent);
    }
    CHECK_EQUAL(word, kRounds - 1);
    bootstrap.all_gather("");
  });
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"everybody to everybody, 2 ranks", [] { everybody_to_everybody(2); }},
      {"everybody to everybody, 4 ranks", [] { everybody_to_everybody(4); }},
      {"a peer that goes is a lost message", a_peer_that_goes_is_a_lost_message},
      {"the last words of a peer are heard by who sends to it", the_last_words_of_a_peer_are_heard_by_who_sends_to_it},
      {"a message given up ends its connection", a_message_given_up_ends_its_connection},
      {"a message posted while the thread looks is sent", a_message_posted_while_the_thread_looks_is_sent},
      {"waiting ends with close", waiting_ends_with_close},
  });
}
