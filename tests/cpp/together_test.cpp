// Rounds, exchanges and messages of one group at the same time, each in a thread of its own, ranks of uneven speed.

#include <exception>
#include <random>

#include "check.h"
#include "exchange/shm_exchange.h"
#include "ranks.h"
#include "shm/group.h"
#include "shm/mailbox.h"

using torchtp::test::error_of;
using torchtp::test::run_threads;
using namespace torchtp::shm;

namespace {

class Constant final : public torchtp::exchange::Source {
 public:
  explicit Constant(int value) : value_(value) {}
  void read(size_t, std::byte* out, size_t num_bytes) const override {
    std::fill(out, out + num_bytes, static_cast<std::byte>(value_));
  }

 private:
  int value_;
};

class Sum final : public torchtp::exchange::Sink {
 public:
  void write(uint32_t, size_t, const std::byte* in, size_t num_bytes) override {
    for (size_t i = 0; i < num_bytes; ++i) total += static_cast<uint64_t>(in[i]);
  }
  uint64_t total = 0;
};

// Now and then long enough for the others to go from spinning over yielding to sleeping.
void dawdle(std::mt19937& random) {
  const auto patience = std::chrono::microseconds(random() % 20 == 0 ? 2500 : random() % 50);
  const auto end = std::chrono::steady_clock::now() + patience;
  while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

void talk_in_rounds(Group& group) {
  std::mt19937 random(group.rank());
  for (uint64_t round = 1; round <= 200; ++round) {
    dawdle(random);
    *group.slot(group.rank()) = static_cast<std::byte>(round);
    group.round({round, 1, 2, 3, 4, 5, 6});
    for (int peer = 0; peer < group.size(); ++peer) CHECK(*group.peer_slot(peer) == static_cast<std::byte>(round));
  }
}

void talk_by_exchange(const std::shared_ptr<Group>& group) {
  torchtp::exchange::ShmExchange exchange(group);
  std::mt19937 random(10 + group->rank());
  const int right = (group->rank() + 1) % group->size(), left = (group->rank() + group->size() - 1) % group->size();
  for (int step = 0; step < 200; ++step) {
    dawdle(random);
    const size_t num_bytes = step % 7 == 0 ? 20'000 : 100 * step;
    const auto source = std::make_shared<Constant>(group->rank() + 1);
    const auto sum = std::make_shared<Sum>();
    exchange.finish(exchange.start({{right, 0, num_bytes, source}}, {{left, num_bytes, sum}}));
    CHECK_EQUAL(sum->total, num_bytes * (left + 1));
  }
}

void talk_by_mail(const std::shared_ptr<Group>& group) {
  Mailbox mailbox(group);
  std::mt19937 random(20 + group->rank());
  std::vector<char> bytes(10'000);
  for (int step = 0; step < 200; ++step) {
    dawdle(random);
    const int root = step % group->size();
    const size_t num_bytes = step % 5 == 0 ? bytes.size() : 8;
    if (group->rank() == root) {
      bytes.assign(bytes.size(), static_cast<char>(step));
      for (int peer = 0; peer < group->size(); ++peer) {
        if (peer != root) mailbox.send(peer, step, bytes.data(), num_bytes);
      }
    } else {
      CHECK_EQUAL(mailbox.recv_any(step, bytes.data(), num_bytes), root);
      CHECK(bytes[0] == static_cast<char>(step) && bytes[num_bytes - 1] == bytes[0]);
    }
  }
}

// The errors of three threads of one rank.
std::vector<std::string> in_three_threads(const std::vector<std::function<void()>>& talks) {
  std::vector<std::string> errors(talks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < talks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        talks[i]();
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

GroupOptions small() {
  GroupOptions options;
  options.heap_bytes = options.slot_bytes = options.ring_bytes = options.mailbox_bytes = 4096;
  return options;
}

void three_conversations_do_not_disturb_each_other() {
  run_threads(3, [](Bootstrap& bootstrap) {
    const auto group = Group::create(bootstrap, small());
    const auto errors = in_three_threads(
        {[&] { talk_in_rounds(*group); }, [&] { talk_by_exchange(group); }, [&] { talk_by_mail(group); }});
    for (const std::string& error : errors) CHECK_EQUAL(error, "");
  });
}

void an_abort_ends_all_conversations() {
  run_threads(2, [](Bootstrap& bootstrap) {
    const auto group = Group::create(bootstrap, small());
    char byte = 0;
    torchtp::exchange::ShmExchange exchange(group);
    Mailbox mailbox(group);
    if (bootstrap.rank() == 1) {
      mailbox.recv(0, 0, &byte, 1);
      group->abort("all of it");
      return;
    }
    const auto errors = in_three_threads({
        [&] { group->round({}); },
        [&] { exchange.finish(exchange.start({}, {{1, 8, std::make_shared<Sum>()}})); },
        [&] {
          mailbox.send(1, 0, &byte, 1);
          mailbox.recv(1, 0, &byte, 1);
        },
    });
    for (const std::string& error : errors) CHECK_CONTAINS(error, "all of it");
  });
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"three conversations do not disturb each other", three_conversations_do_not_disturb_each_other},
      {"an abort ends all conversations", an_abort_ends_all_conversations},
  });
}
