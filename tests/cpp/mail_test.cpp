// Messages with tags between ranks that are threads, over loopback; and a rank that says nonsense.
#include "net/mail.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "check.h"
#include "doors.h"
#include "ranks.h"

using torchtp::cat;
using torchtp::Contents;
using torchtp::Deadline;
using torchtp::Fd;
using torchtp::shm::Bootstrap;
using namespace torchtp::net;
using namespace torchtp::test;

namespace {

using std::chrono::milliseconds;

Mail::Memory memory(size_t num_bytes, int value = 0) {
  std::shared_ptr<std::byte[]> bytes(new std::byte[std::max<size_t>(num_bytes, 1)]);
  std::memset(bytes.get(), value, num_bytes);
  return {bytes, bytes.get()};
}

Mail::State end_of(Mail& mail, const Mail::MessagePtr& message) {
  const Deadline deadline(kSoon);
  Mail::State state = Mail::State::kUnderWay;
  while (state == Mail::State::kUnderWay && !deadline.passed()) state = mail.wait(*message, milliseconds(1000));
  return state;
}

void check_done(Mail& mail, const Mail::MessagePtr& message) {
  if (end_of(mail, message) != Mail::State::kDone) torchtp::test::fail(__FILE__, __LINE__, mail.trouble(*message));
}

void check_filled(const Mail::Memory& bytes, size_t num_bytes, int value) {
  CHECK(std::all_of(bytes.get(), bytes.get() + num_bytes,
                    [&](std::byte each) { return each == static_cast<std::byte>(value); }));
}

// Everybody sends to everybody in one order, and receives by tags in another.
void in_any_order(int size) {
  constexpr int kMessages = 40, kTags = 4;
  run_threads(size, [&](Bootstrap& bootstrap) {
    Mail mail(bootstrap.rank(), connections(bootstrap, 1));
    const auto size_at = [](int from, int to, int i) {
      const int kind = (from * 7 + to * 3 + i) % 6;
      return kind == 0 ? 0 : kind < 4 ? kind * 777 : Mail::kEagerBytes * (kind - 3) + i;
    };
    struct Expected {
      Mail::MessagePtr message;
      Mail::Memory bytes;
      size_t num_bytes;
      int value;
    };
    std::vector<Mail::MessagePtr> sends;
    std::vector<Expected> receives;
    const int me = bootstrap.rank();
    const auto send = [&](int to) {
      for (int i = 0; i < kMessages; ++i) {
        const size_t num_bytes = size_at(me, to, i);
        sends.push_back(mail.send(to, i % kTags, memory(num_bytes, me + to + i), num_bytes));
      }
    };
    const auto receive = [&](int from) {
      for (int tag = kTags - 1; tag >= 0; --tag) {
        for (int i = tag; i < kMessages; i += kTags) {
          const size_t num_bytes = size_at(from, me, i);
          const Mail::Memory bytes = memory(num_bytes, 255);
          receives.push_back({mail.receive(from, tag, bytes, num_bytes), bytes, num_bytes, me + from + i});
        }
      }
    };
    for (int r = 0; r < size; ++r) {
      if (r == me) continue;
      if (me % 2) receive(r);
      send(r);
    }
    for (int r = 0; r < size && me % 2 == 0; ++r) {
      if (r != me) receive(r);
    }
    for (const Expected& each : receives) {
      check_done(mail, each.message);
      check_filled(each.bytes, each.num_bytes, each.value);
    }
    for (const auto& each : sends) check_done(mail, each);
    bootstrap.all_gather("");
  });
}

void from_anybody() {
  run_threads(4, [](Bootstrap& bootstrap) {
    Mail mail(bootstrap.rank(), connections(bootstrap, 1));
    const size_t num_bytes = 200'000;
    if (bootstrap.rank() == 0) {
      std::vector<int> found;
      for (int i = 0; i < 6; ++i) {
        const Mail::Memory bytes = memory(num_bytes);
        const auto message = mail.receive(Mail::kAnyPeer, 9, bytes, num_bytes);
        check_done(mail, message);
        found.push_back(mail.source(*message));
        check_filled(bytes, num_bytes, found.back());
      }
      std::sort(found.begin(), found.end());
      CHECK(found == std::vector<int>({1, 1, 2, 2, 3, 3}));
    } else {
      for (int i = 0; i < 2; ++i) mail.send(0, 9, memory(num_bytes, bootstrap.rank()), num_bytes);  // no handle is kept
    }
    bootstrap.all_gather("");
  });
}

void much_that_nobody_asks_for_waits_at_its_sender() {
  run_threads(2, [](Bootstrap& bootstrap) {
    Mail mail(bootstrap.rank(), connections(bootstrap, 1));
    constexpr int kMessages = 1000;
    constexpr size_t kBytes = 60'000;
    if (bootstrap.rank() == 0) {
      std::vector<Mail::MessagePtr> messages;
      for (int i = 0; i < kMessages; ++i) messages.push_back(mail.send(1, 1, memory(kBytes, i), kBytes));
      check_done(mail, messages.front());
      CHECK(mail.wait(*messages.back(), milliseconds(1)) == Mail::State::kUnderWay);
      bootstrap.all_gather("");
      for (const auto& each : messages) check_done(mail, each);
    } else {
      bootstrap.all_gather("");
      for (int i = 0; i < kMessages; ++i) {
        const Mail::Memory bytes = memory(kBytes);
        check_done(mail, mail.receive(0, 1, bytes, kBytes));
        check_filled(bytes, kBytes, i);
      }
    }
    bootstrap.all_gather("");
  });
}

void an_empty_one_waits_there_too() {
  run_threads(2, [](Bootstrap& bootstrap) {
    Mail mail(bootstrap.rank(), connections(bootstrap, 1));
    constexpr int kMessages = 100;
    const size_t kBytes = Mail::kEagerBytes;
    if (bootstrap.rank() == 0) {
      std::vector<Mail::MessagePtr> messages;
      for (int i = 0; i < kMessages; ++i) messages.push_back(mail.send(1, 1, memory(kBytes), kBytes));
      for (int i = 0; i < 2; ++i) messages.push_back(mail.send(1, 2, memory(i), i));
      for (int i = 0; i < 100'000; ++i) messages.push_back(mail.send(1, 3, memory(0), 0));
      bootstrap.all_gather("");
      for (const auto& each : messages) check_done(mail, each);
    } else {
      bootstrap.all_gather("");
      for (int i = 0; i < 2; ++i) check_done(mail, mail.receive(0, 2, memory(i), i));
      for (int i = 0; i < 100'000; ++i) check_done(mail, mail.receive(0, 3, memory(0), 0));
      for (int i = 0; i < kMessages; ++i) check_done(mail, mail.receive(0, 1, memory(kBytes), kBytes));
    }
    bootstrap.all_gather("");
  });
}

void two_contents_are_an_error_that_names_both(const Contents& wanted) {
  const auto describe = [](const Contents& each) { return cat(each.num_bytes, " of type ", each.dtype + 0); };
  for (const size_t sent : {size_t{10}, size_t{1} << 20}) {
    run_threads(2, [&](Bootstrap& bootstrap) {
      Mail mail(bootstrap.rank(), connections(bootstrap, 1), describe);
      const Contents receives(wanted.num_bytes != 0 ? wanted.num_bytes : sent, wanted.dtype);
      const std::string error =
          cat("rank 1 receives ", describe(receives), " with tag 3 from rank 0, which sent ", sent, " of type 6");
      if (bootstrap.rank() == 0) {
        const auto message = mail.send(1, 3, memory(sent, 1), {sent, 6});
        if (sent > Mail::kEagerBytes) {
          CHECK(end_of(mail, message) == Mail::State::kFailed);
          CHECK_EQUAL(mail.trouble(*message), error);
        }
        check_done(mail, mail.send(1, 3, memory(7, 2), 7));
      } else {
        const auto message = mail.receive(0, 3, memory(receives.num_bytes), receives);
        CHECK(end_of(mail, message) == Mail::State::kFailed);
        CHECK_EQUAL(mail.trouble(*message), error);
        const Mail::Memory bytes = memory(7);
        check_done(mail, mail.receive(0, 3, bytes, 7));  // the next is right again
        check_filled(bytes, 7, 2);
      }
      bootstrap.all_gather("");
    });
  }
}

void who_goes_says_why() {
  run_threads(3, [](Bootstrap& bootstrap) {
    auto mail = std::make_unique<Mail>(bootstrap.rank(), connections(bootstrap, 1));
    const int me = bootstrap.rank();
    if (me == 2) {
      mail->send(0, 1, memory(4, 8), 4);
      mail->say_goodbye("rank 2 has\nhad enough", milliseconds(10'000));
      mail.reset();
      for (int i = 0; i < 3; ++i) bootstrap.all_gather("");
      return;
    }
    bootstrap.all_gather("");
    if (me == 0) {
      const Mail::Memory bytes = memory(4);
      CHECK(end_of(*mail, mail->receive(2, 2, memory(4), 4)) == Mail::State::kLost);
      check_done(*mail, mail->receive(2, 1, bytes, 4));  // what it sent before
      check_filled(bytes, 4, 8);
      CHECK(end_of(*mail, mail->send(2, 1, memory(4), 4)) == Mail::State::kLost);
    }
    CHECK_EQUAL(mail->goodbye_of(2, milliseconds(10'000)), "rank 2 has?had enough");
    CHECK_EQUAL(mail->goodbye_of(1 - me, milliseconds(1)), "");
    const auto anybody = mail->receive(Mail::kAnyPeer, 5, memory(4), 4);  // one is left
    CHECK(mail->wait(*anybody, milliseconds(1)) == Mail::State::kUnderWay);
    bootstrap.all_gather("");
    mail->send(1 - me, 5, memory(4, 1), 4);
    check_done(*mail, anybody);
    bootstrap.all_gather("");
  });
}

// The same number twice: the first receive would be forgotten.
void an_offer_made_twice_ends_the_connection() {
  struct Header {
    uint16_t kind, dtype;
    int32_t tag;
    uint64_t num_bytes, number;
  };
  run_threads(2, [](Bootstrap& bootstrap) {
    auto made = connections(bootstrap, 1);
    constexpr size_t kBytes = 2 * Mail::kEagerBytes;
    if (bootstrap.rank() == 0) {
      Mail mail(0, std::move(made));
      const auto one = mail.receive(1, 0, memory(kBytes), kBytes), other = mail.receive(1, 0, memory(kBytes), kBytes);
      bootstrap.all_gather("");
      CHECK(end_of(mail, one) == Mail::State::kLost && end_of(mail, other) == Mail::State::kLost);
    } else {
      const Header offer{2, 0, 0, kBytes, 0}, offers[] = {offer, offer};
      CHECK_EQUAL(send(made.at(0).get(), offers, sizeof(offers), MSG_NOSIGNAL), ssize_t{sizeof(offers)});
      bootstrap.all_gather("");
    }
    bootstrap.all_gather("");
  });
}

// One header that no rank says there. Its sender stays: the connection ends because of the header.
void a_wrong_header_ends_the_connection() {
  struct Header {
    uint16_t kind, dtype;
    int32_t tag;
    uint64_t num_bytes, number;
  };
  const std::vector<Header> wrong = {
      {0, 0, 0, 0, 0},                      // of no kind
      {8, 0, 0, 0, 0},                      //
      {1, 0, 0, Mail::kEagerBytes + 1, 0},  // too much at once
      {2, 0, 0, 1, 1},                      // an offer before the first
      {3, 0, 0, 0, 5},                      // of what was not offered
      {5, 0, 0, 0, 5},                      //
      {4, 0, 0, 10, 0},                     // of what was not asked for
      {6, 0, 0, 1, 0},                      // more taken than sent
      {7, 0, 0, size_t{1} << 20, 0},        // many words
  };
  for (const Header& header : wrong) {
    run_threads(2, [&](Bootstrap& bootstrap) {
      auto made = connections(bootstrap, 1);
      if (bootstrap.rank() == 0) {
        Mail mail(0, std::move(made));
        CHECK(end_of(mail, mail.receive(1, 9, memory(1), 1)) == Mail::State::kLost);
        bootstrap.all_gather("");
      } else {
        CHECK_EQUAL(send(made.at(0).get(), &header, sizeof(header), MSG_NOSIGNAL), ssize_t{sizeof(header)});
        bootstrap.all_gather("");
      }
    });
  }
}

void nonsense_ends_the_connection() {
  run_threads(2, [](Bootstrap& bootstrap) {
    std::mt19937 random(7);
    for (int trial = 0; trial < 200; ++trial) {
      auto made = connections(bootstrap, 1);
      if (bootstrap.rank() == 0) {
        Mail mail(0, std::move(made));
        const auto one = mail.receive(1, 0, memory(100), 100);
        const auto other = mail.send(1, 0, memory(100'000), 100'000);
        bootstrap.all_gather("");
        end_of(mail, one);
        CHECK(end_of(mail, other) == Mail::State::kLost || end_of(mail, other) == Mail::State::kFailed ||
              end_of(mail, other) == Mail::State::kDone);
      } else {
        std::vector<uint32_t> words(random() % 200);
        for (uint32_t& word : words) word = random() % 4 == 0 ? random() : random() % 9;
        [[maybe_unused]] const ssize_t sent = send(made.at(0).get(), words.data(), words.size() * 4, MSG_NOSIGNAL);
        bootstrap.all_gather("");
      }
    }
  });
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"in any order, 2 ranks", [] { in_any_order(2); }},
      {"in any order, 4 ranks", [] { in_any_order(4); }},
      {"from anybody", from_anybody},
      {"much that nobody asks for waits at its sender", much_that_nobody_asks_for_waits_at_its_sender},
      {"an empty one waits there too", an_empty_one_waits_there_too},
      {"two sizes are an error that names both", [] { two_contents_are_an_error_that_names_both({5, 6}); }},
      {"two types are an error that names both", [] { two_contents_are_an_error_that_names_both({0, 7}); }},
      {"who goes says why", who_goes_says_why},
      {"an offer made twice ends the connection", an_offer_made_twice_ends_the_connection},
      {"a wrong header ends the connection", a_wrong_header_ends_the_connection},
      {"nonsense ends the connection", nonsense_ends_the_connection},
  });
}
