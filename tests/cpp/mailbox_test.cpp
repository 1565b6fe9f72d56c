// Point-to-point messages between ranks that are threads.

#include "shm/mailbox.h"

#include <algorithm>
#include <map>
#include <random>

#include "check.h"
#include "core/error.h"
#include "core/format.h"
#include "ranks.h"

using torchtp::cat;
using torchtp::Contents;
using torchtp::test::error_of;
using torchtp::test::run_threads;
using namespace torchtp::shm;
using std::chrono::milliseconds;

namespace {

constexpr size_t kRing = 4096;

std::shared_ptr<Group> make(Bootstrap& bootstrap, milliseconds timeout = milliseconds(60000)) {
  GroupOptions options;
  options.slot_bytes = 4096;
  options.heap_bytes = 4096;
  options.ring_bytes = 4096;
  options.mailbox_bytes = kRing;
  options.timeout = timeout;
  return Group::create(bootstrap, options);
}

using Bytes = std::vector<unsigned char>;

Bytes content(unsigned key, size_t num_bytes) {
  Bytes bytes(num_bytes);
  for (size_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<unsigned char>((key * 2654435761u + i * 40503u) >> 9);
  return bytes;
}

void tags_are_not_mixed() {
  run_threads(2, [](Bootstrap& bootstrap) {
    Mailbox mailbox(make(bootstrap));
    constexpr int kTags = 20;
    if (bootstrap.rank() == 0) {
      for (int tag = 0; tag < kTags; ++tag) mailbox.send(1, tag, content(tag, 100 * tag).data(), 100 * tag);
    } else {
      for (int tag = kTags; tag-- > 0;) {
        Bytes bytes(100 * tag);
        mailbox.recv(0, tag, bytes.data(), bytes.size());
        CHECK(bytes == content(tag, bytes.size()));
      }
    }
  });
}

void one_tag_keeps_its_order() {
  run_threads(2, [](Bootstrap& bootstrap) {
    Mailbox mailbox(make(bootstrap));
    for (unsigned i = 0; i < 100; ++i) {
      Bytes bytes = content(i, 500);
      if (bootstrap.rank() == 0) {
        mailbox.send(1, i % 2, bytes.data(), bytes.size());
      } else {
        Bytes got(500);
        mailbox.recv(0, i % 2, got.data(), got.size());
        CHECK(got == bytes);
      }
    }
  });
}

// Both sides send more than a ring holds before they receive.
void both_send_first() {
  run_threads(3, [](Bootstrap& bootstrap) {
    Mailbox mailbox(make(bootstrap));
    for (unsigned round = 0; round < 20; ++round) {
      const size_t num_bytes = round % 3 == 0 ? 0 : round * kRing;
      std::vector<Bytes> out, in;
      std::vector<Mailbox::Ticket> sends, receives;
      std::vector<int> peers;
      for (int peer = 0; peer < 3; ++peer) {
        out.push_back(content(round * 9 + bootstrap.rank() * 3 + peer, num_bytes));
        in.emplace_back(num_bytes);
        if (peer != bootstrap.rank()) peers.push_back(peer);
      }
      for (int peer : peers) sends.push_back(mailbox.post_send(peer, 4, out[peer].data(), num_bytes));
      for (int peer : peers) receives.push_back(mailbox.post_recv(peer, 4, in[peer].data(), num_bytes));
      for (size_t i = 0; i < peers.size(); ++i) {
        CHECK_EQUAL(mailbox.wait(sends[i]), peers[i]);
        CHECK_EQUAL(mailbox.wait(receives[i]), peers[i]);
        CHECK(in[peers[i]] == content(round * 9 + peers[i] * 3 + bootstrap.rank(), num_bytes));
      }
    }
  });
}

void any_rank_is_told_who_it_was() {
  run_threads(4, [](Bootstrap& bootstrap) {
    Mailbox mailbox(make(bootstrap));
    constexpr int kMessages = 30;
    if (bootstrap.rank() != 0) {
      for (int i = 0; i < kMessages; ++i) mailbox.send(0, 1, content(bootstrap.rank() * 100 + i, 300).data(), 300);
      return;
    }
    std::map<int, int> seen;
    for (int i = 0; i < 3 * kMessages; ++i) {
      Bytes bytes(300);
      const int peer = mailbox.recv_any(1, bytes.data(), bytes.size());
      CHECK(bytes == content(peer * 100 + seen[peer]++, 300));
    }
    for (int peer = 1; peer < 4; ++peer) CHECK_EQUAL(seen[peer], kMessages);
  });
}

// Everything posted in a random order of tags and waited for in another.
void random_traffic_arrives() {
  for (unsigned seed = 0; seed < 10; ++seed) {
    run_threads(3, [&](Bootstrap& bootstrap) {
      Mailbox mailbox(make(bootstrap));
      const int me = bootstrap.rank();
      std::mt19937 shared(seed), own(seed * 3 + me);
      struct Posted {
        Mailbox::Ticket ticket;
        Bytes bytes, expected;
      };
      std::vector<std::unique_ptr<Posted>> posted;
      struct Message {
        int from, to, tag;
        unsigned key;
        size_t num_bytes;
      };
      std::vector<Message> messages;
      for (unsigned i = 0; i < 60; ++i) {
        const int from = static_cast<int>(shared() % 3), to = static_cast<int>((from + 1 + shared() % 2) % 3);

        messages.push_back({from, to, static_cast<int>(i), i, shared() % 4 ? shared() % 500 : shared() % (4 * kRing)});
      }
      std::shuffle(messages.begin(), messages.end(), own);
      for (const Message& m : messages) {
        auto next = std::make_unique<Posted>();
        next->expected = content(m.key, m.num_bytes);
        if (m.from == me) {
          next->bytes = next->expected;
          next->ticket = mailbox.post_send(m.to, m.tag, next->bytes.data(), m.num_bytes);
        } else if (m.to == me) {
          next->bytes.resize(m.num_bytes);
          next->ticket = mailbox.post_recv(m.from, m.tag, next->bytes.data(), m.num_bytes);
        } else {
          continue;
        }
        posted.push_back(std::move(next));
      }
      std::shuffle(posted.begin(), posted.end(), own);
      for (const auto& p : posted) mailbox.wait(p->ticket);
      for (const auto& p : posted) CHECK(p->bytes == p->expected);
    });
  }
}

void two_threads_of_a_rank_may_wait() {
  run_threads(2, [](Bootstrap& bootstrap) {
    Mailbox mailbox(make(bootstrap));
    const int peer = 1 - bootstrap.rank();
    const auto talk = [&](int tag) {
      for (unsigned i = 0; i < 100; ++i) {
        const size_t num_bytes = i % 10 == 0 ? 2 * kRing : 64;
        Bytes out = content(i + tag, num_bytes), in(num_bytes);
        const auto send = mailbox.post_send(peer, tag, out.data(), num_bytes);
        mailbox.recv(peer, tag, in.data(), num_bytes);
        mailbox.wait(send);
        CHECK(in == out);
      }
    };
    std::exception_ptr error;
    std::thread other([&] {
      try {
        talk(1000);
      } catch (...) {
        error = std::current_exception();
      }
    });
    talk(2000);
    other.join();
    if (error) std::rethrow_exception(error);
  });
}

constexpr const char* kSizesDiffer = "rank 1 receives 64 of type 3 with tag 7 from rank 0, which sent 100 of type 3";
constexpr const char* kTypesDiffer = "rank 1 receives 100 of type 4 with tag 7 from rank 0, which sent 100 of type 3";

// `is_late`: the receive is posted when the message has been set aside.
void contents_that_differ_are_an_error(const Contents& wanted, bool is_late, const std::string& expected) {
  run_threads(2, [&](Bootstrap& bootstrap) {
    Mailbox mailbox(make(bootstrap),
                    [](const Contents& each) { return cat(each.num_bytes, " of type ", each.dtype + 0); });
    Bytes bytes(100);
    const std::string error = error_of([&] {
      if (bootstrap.rank() == 0) {
        mailbox.send(1, 7, bytes.data(), {100, 3});
        if (is_late) mailbox.send(1, 9, bytes.data(), 1);
        mailbox.recv(1, 8, bytes.data(), 1);
      } else {
        if (is_late) mailbox.recv(0, 9, bytes.data(), 1);
        mailbox.recv(0, 7, bytes.data(), wanted);
      }
    });
    CHECK_CONTAINS(error, expected);
  });
}

// Who hears of the error frees its buffers.
void nothing_moves_after_an_error() {
  run_threads(2, [](Bootstrap& bootstrap) {
    Mailbox mailbox(make(bootstrap));
    const Bytes sent = content(1, 100);
    Bytes untouched(100);
    std::string error;
    if (bootstrap.rank() == 0) {
      const auto first = mailbox.post_send(1, 7, sent.data(), 100);
      const auto second = mailbox.post_send(1, 8, sent.data(), 100);
      bootstrap.all_gather("");
      mailbox.wait(first);
      mailbox.wait(second);
      error = error_of([&] { mailbox.recv(1, 9, untouched.data(), 100); });
    } else {
      bootstrap.all_gather("");
      const auto other = mailbox.post_recv(0, 9, untouched.data(), 100);
      error = error_of([&] { mailbox.recv(0, 7, nullptr, 0); });
      CHECK_CONTAINS(error_of([&] { mailbox.is_done(other); }), error);
      CHECK_CONTAINS(error_of([&] { mailbox.post_recv(0, 8, untouched.data(), 100); }), error);
      CHECK_CONTAINS(error_of([&] { mailbox.wait(other); }), error);
    }
    CHECK(untouched == Bytes(100));
    CHECK_CONTAINS(error, "rank 1 receives 0 bytes with tag 7 from rank 0, which sent 100 bytes");
  });
}

void nothing_moves_after_the_end() {
  run_threads(2, [](Bootstrap& bootstrap) {
    const auto group = make(bootstrap);
    Mailbox mailbox(group);
    char byte = 0;
    if (bootstrap.rank() == 0) {
      const auto pending = mailbox.post_recv(1, 1, &byte, 1);
      std::string error;
      std::thread waiting([&] { error = error_of([&] { mailbox.recv(1, 2, &byte, 1); }); });
      mailbox.close();
      waiting.join();
      bootstrap.all_gather("");
      bootstrap.all_gather("");
      CHECK_CONTAINS(error, "rank 0 shut the group down before the message arrived");
      CHECK_CONTAINS(error_of([&] { mailbox.is_done(pending); }), "shut the group down");
      CHECK_CONTAINS(error_of([&] { mailbox.post_send(1, 1, &byte, 1); }), "shut the group down");
      CHECK_EQUAL(byte, 0);
    } else {
      bootstrap.all_gather("");
      const char one = 1;
      mailbox.send(0, 1, &one, 1);
      mailbox.send(0, 2, &one, 1);
      bootstrap.all_gather("");
    }
    CHECK(!group->aborted());
    bootstrap.all_gather("");
  });
}

void wrong_peers_are_refused_at_once() {
  run_threads(2, [](Bootstrap& bootstrap) {
    Mailbox mailbox(make(bootstrap));
    char byte = 0;
    CHECK_CONTAINS(error_of([&] { mailbox.send(bootstrap.rank(), 0, &byte, 1); }), "(itself)");
    CHECK_CONTAINS(error_of([&] { mailbox.recv(2, 0, &byte, 1); }), "with rank 2");
    CHECK_CONTAINS(error_of([&] { mailbox.recv(-1, 0, &byte, 1); }), "with rank -1");
    CHECK_CONTAINS(error_of([&] { mailbox.wait(99); }), "ticket 99");
    bootstrap.all_gather("");
  });
}

void a_departure_is_an_error_only_for_who_waits() {
  run_threads(3, [](Bootstrap& bootstrap) {
    const auto group = make(bootstrap);
    Mailbox mailbox(group);
    char byte = 5;
    if (bootstrap.rank() == 2) return;
    if (bootstrap.rank() == 0) {
      for (int i = 0; i < 20; ++i) mailbox.send(1, i, &byte, 1);
      mailbox.recv(1, 0, &byte, 1);
      return;
    }
    for (int i = 0; i < 20; ++i) mailbox.recv_any(i, &byte, 1);
    mailbox.send(0, 0, &byte, 1);
    const std::string error = error_of([&] { mailbox.recv_any(0, &byte, 1); });
    CHECK_CONTAINS(error, "ranks 0, 2 left the group while rank 1 waited in recv of 1 bytes with tag 0 from any rank");
  });
}

void a_deadline_is_an_error() {
  run_threads(2, [](Bootstrap& bootstrap) {
    Mailbox mailbox(make(bootstrap, milliseconds(200)));
    char byte = 0;
    if (bootstrap.rank() == 0) {
      CHECK_CONTAINS(
          error_of([&] { mailbox.recv(1, 3, &byte, 1); }),
          "recv of 1 bytes with tag 3 from rank 1: rank 1 has not arrived after 200 ms (the timeout of rank 0)");
    }
    bootstrap.all_gather("");
  });
}

// The group's timeout is that of messages, whatever a call in another thread has of its own; and the other way round.
void rounds_have_a_timeout_of_their_own() {
  run_threads(2, [](Bootstrap& bootstrap) {
    for (const bool message : {true, false}) {
      const auto group = make(bootstrap);
      group->set_timeout(milliseconds(message ? 50 : 60000));
      group->set_round_timeout(milliseconds(message ? 60000 : 50));
      if (bootstrap.rank() == 0) {
        Mailbox mailbox(group);
        Bytes bytes(100);
        const std::string error =
            error_of([&] { message ? mailbox.recv(1, 7, bytes.data(), bytes.size()) : group->round(making()); });
        CHECK_CONTAINS(error, "after 50 ms (the timeout of rank 0)");
      }
      bootstrap.all_gather("");
    }
  });
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"tags are not mixed", tags_are_not_mixed},
      {"one tag keeps its order", one_tag_keeps_its_order},
      {"both send first", both_send_first},
      {"any rank is told who it was", any_rank_is_told_who_it_was},
      {"random traffic arrives", random_traffic_arrives},
      {"two threads of a rank may wait", two_threads_of_a_rank_may_wait},
      {"sizes that differ are an error", [] { contents_that_differ_are_an_error({64, 3}, false, kSizesDiffer); }},
      {"types that differ are an error", [] { contents_that_differ_are_an_error({100, 4}, false, kTypesDiffer); }},
      {"types that differ are an error late, too",
       [] { contents_that_differ_are_an_error({100, 4}, true, kTypesDiffer); }},
      {"nothing moves after an error", nothing_moves_after_an_error},
      {"nothing moves after the end", nothing_moves_after_the_end},
      {"wrong peers are refused at once", wrong_peers_are_refused_at_once},
      {"a departure is an error only for who waits", a_departure_is_an_error_only_for_who_waits},
      {"a deadline is an error", a_deadline_is_an_error},
      {"rounds have a timeout of their own", rounds_have_a_timeout_of_their_own},
  });
}
