// What every exchange must do, run on each of them.

#include <algorithm>
#include <cstring>
#include <random>

#include "core/error.h"
#include "exchange_kinds.h"

using namespace torchtp::test;

namespace {

// Everybody sends to everybody, sizes from the generator all ranks share; several under way, finished in a random
// order.
void any_sizes_in_any_order(const Kind& kind, int size, size_t largest, int steps, unsigned seed) {
  kind.run(size, kLong, [&](Exchange& exchange, torchtp::shm::Bootstrap&) {
    std::mt19937 shared(seed), own(seed + 1 + exchange.rank());
    struct UnderWay {
      uint64_t ticket;
      std::vector<std::shared_ptr<KeySink>> sinks;
      std::vector<size_t> sizes;
      std::vector<int> peers;
      std::unique_ptr<std::vector<int>> order;
    };
    std::vector<UnderWay> under_way;
    const auto finish_one = [&] {
      std::swap(under_way[own() % under_way.size()], under_way.back());
      UnderWay last = std::move(under_way.back());
      under_way.pop_back();
      exchange.finish(last.ticket);
      std::vector<int> expected;
      for (size_t i = 0; i < last.sinks.size(); ++i) {
        CHECK_EQUAL(last.sinks[i]->written, last.sizes[i]);
        if (last.sizes[i] > 0) expected.push_back(last.peers[i]);
      }
      std::sort(expected.begin(), expected.end());
      CHECK(*last.order == expected);
    };
    for (int step = 0; step < steps; ++step) {
      UnderWay next;
      next.order = std::make_unique<std::vector<int>>();
      std::vector<Send> sends;
      std::vector<Receive> receives;
      for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
          const unsigned dice = shared() % 4;
          const size_t num_bytes = dice == 0 ? 0 : shared() % (dice == 1 ? largest : 300);
          if (from == to || shared() % 5 == 0) continue;
          if (from == exchange.rank()) sends.push_back(send_of(step, from, to, num_bytes));
          if (to == exchange.rank()) {
            next.sinks.push_back(std::make_shared<KeySink>(key_of(step, from, to), next.order.get(), from));
            next.sizes.push_back(num_bytes);
            next.peers.push_back(from);
            receives.push_back({from, num_bytes, next.sinks.back()});
          }
        }
      }
      std::shuffle(receives.begin(), receives.end(), own);
      next.ticket = exchange.start(std::move(sends), std::move(receives));
      under_way.push_back(std::move(next));
      while (under_way.size() > own() % 4) finish_one();
    }
    while (!under_way.empty()) finish_one();
  });
}

void small_messages(const Kind& kind) {
  for (int size : {1, 2, 3, 4}) any_sizes_in_any_order(kind, size, 2000, 150, 10 + size);
}

void messages_larger_than_a_ring(const Kind& kind) {
  for (int size : {2, 3, 4}) any_sizes_in_any_order(kind, size, 5 * kRing, 40, 20 + size);
}

void a_chain_of_neighbours(const Kind& kind) {
  kind.run(4, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap&) {
    for (uint64_t step = 0; step < 100; ++step) {
      std::vector<Send> sends;
      std::vector<Receive> receives;
      const size_t num_bytes = step % 3 == 0 ? 3 * kRing + 17 : 4096;
      for (int peer : {exchange.rank() - 1, exchange.rank() + 1}) {
        if (peer < 0 || peer >= exchange.size()) continue;
        sends.push_back(send_of(step, exchange.rank(), peer, num_bytes));
        receives.push_back({peer, num_bytes, std::make_shared<KeySink>(key_of(step, peer, exchange.rank()))});
      }
      exchange.finish(exchange.start(std::move(sends), std::move(receives)));
    }
  });
}

// The receiver finishes the last exchange first: everything before must get out of the way.
void finishing_backwards(const Kind& kind) {
  kind.run(2, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap&) {
    const int peer = 1 - exchange.rank();
    std::vector<uint64_t> tickets;
    std::vector<std::shared_ptr<KeySink>> sinks;
    for (uint64_t step = 0; step < 10; ++step) {
      sinks.push_back(std::make_shared<KeySink>(key_of(step, peer, exchange.rank())));
      tickets.push_back(exchange.start({send_of(step, exchange.rank(), peer, 10'000)}, {{peer, 10'000, sinks.back()}}));
    }
    for (size_t i = tickets.size(); i-- > 0;) {
      exchange.finish(tickets[i]);
      CHECK_EQUAL(sinks[i]->written, size_t{10'000});
    }
    CHECK_CONTAINS(error_of([&] { exchange.finish(tickets[0]); }), "no exchange 1 is under way");
  });
}

void two_messages_for_one_peer_keep_their_order(const Kind& kind) {
  kind.run(2, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap&) {
    const int peer = 1 - exchange.rank(), me = exchange.rank();
    std::vector<int> order;
    std::vector<Receive> receives = {{peer, 100, std::make_shared<KeySink>(key_of(1, peer, me), &order, 1)},
                                     {peer, 0, std::make_shared<KeySink>(key_of(3, peer, me), &order, 3)},
                                     {peer, 200, std::make_shared<KeySink>(key_of(2, peer, me), &order, 2)}};
    exchange.finish(
        exchange.start({send_of(1, me, peer, 100), send_of(3, me, peer, 0), send_of(2, me, peer, 200)}, receives));
    CHECK((order == std::vector<int>{1, 2}));
  });
}

// Somebody sends and does not look for a long time; the other side must have it all the same once it fits the ring.
void a_start_alone_delivers_what_fits(const Kind& kind) {
  kind.run(2, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap& bootstrap) {
    const int peer = 1 - exchange.rank();
    if (exchange.rank() == 0) {
      const uint64_t ticket = exchange.start({send_of(1, 0, 1, 5000)}, {});
      bootstrap.all_gather("");
      exchange.finish(ticket);
    } else {
      const auto sink = std::make_shared<KeySink>(key_of(1, 0, 1));
      exchange.finish(exchange.start({}, {{peer, 5000, sink}}));
      CHECK_EQUAL(sink->written, size_t{5000});
      bootstrap.all_gather("");
    }
  });
}

void sizes_that_differ_are_an_error(const Kind& kind) {
  kind.run(2, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap&) {
    const int me = exchange.rank(), peer = 1 - me;
    const auto sink = std::make_shared<KeySink>(key_of(1, peer, me));
    const std::string error = error_of([&] {
      for (int i = 0; i < 2; ++i) {  // rank 0 finds nothing wrong in the first
        exchange.finish(exchange.start({send_of(1, me, peer, 100)}, {{peer, size_t(me == 0 ? 100 : 128), sink}}));
        sink->written = 0;
      }
    });
    CHECK_CONTAINS(error, "rank 1 expects 128 bytes from rank 0");
    CHECK_CONTAINS(error, "rank 0 sent 100 bytes");
  });
}

void an_exchange_left_out_is_an_error(const Kind& kind) {
  kind.run(2, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap&) {
    const std::string error = error_of([&] {
      if (exchange.rank() == 0) {
        exchange.start({}, {});
        exchange.finish(exchange.start({send_of(1, 0, 1, 64)}, {{1, 64, std::make_shared<KeySink>(key_of(1, 1, 0))}}));
      } else {
        exchange.finish(exchange.start({send_of(1, 1, 0, 64)}, {{0, 64, std::make_shared<KeySink>(key_of(1, 0, 1))}}));
      }
      exchange.finish(exchange.start({}, {{1 - exchange.rank(), 64, std::make_shared<KeySink>(0)}}));
    });
    CHECK_CONTAINS(error, "exchange #2");
    CHECK_CONTAINS(error, "exchange #1");
  });
}

void a_peer_that_left_is_an_error(const Kind& kind) {
  kind.run(2, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap&) {
    if (exchange.rank() == 0) return;
    const std::string error =
        error_of([&] { exchange.finish(exchange.start({}, {{0, 64, std::make_shared<KeySink>(0)}})); });
    CHECK_CONTAINS(error, "rank 0 left the group");
    CHECK_CONTAINS(error, "64 bytes from rank 0");
  });
}

// What a rank sent before it left still arrives.
void leaving_does_not_take_back(const Kind& kind) {
  for (int i = 0; i < 20; ++i) {
    kind.run(2, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap&) {
      if (exchange.rank() == 0) {
        exchange.finish(exchange.start({send_of(1, 0, 1, 3000)}, {}));
      } else {
        const auto sink = std::make_shared<KeySink>(key_of(1, 0, 1));
        exchange.finish(exchange.start({}, {{0, 3000, sink}}));
        CHECK_EQUAL(sink->written, size_t{3000});
      }
    });
  }
}

void abort_is_an_error_for_who_waits(const Kind& kind) {
  if (!kind.abort) return;
  kind.run(3, kLong, [&](Exchange& exchange, torchtp::shm::Bootstrap& bootstrap) {
    if (exchange.rank() == 2) {
      kind.abort(exchange, "somebody stumbled");
    } else {
      const auto wait = [&] { exchange.finish(exchange.start({}, {{2, 64, std::make_shared<KeySink>(0)}})); };
      CHECK_CONTAINS(error_of(wait), "somebody stumbled");
      CHECK_CONTAINS(error_of(wait), "somebody stumbled");
    }
    bootstrap.all_gather("");
  });
}

void a_deadline_is_an_error(const Kind& kind) {
  kind.run(2, milliseconds(kind.name == "shm" ? 300 : 50),
           [&kind](Exchange& exchange, torchtp::shm::Bootstrap& bootstrap) {
             if (exchange.rank() == 1) {
               const std::string error =
                   error_of([&] { exchange.finish(exchange.start({}, {{0, 640, std::make_shared<KeySink>(0)}})); });
               CHECK_CONTAINS(error, kind.name == "shm" ? "(the timeout of rank 1)" : "timeout of ");
               CHECK_CONTAINS(error, "640 bytes from rank 0");
             }
             bootstrap.all_gather("");
           });
}

void an_error_in_a_sink_reaches_everybody(const Kind& kind) {
  if (kind.name != "shm") return;
  class Broken final : public Sink {
    void write(uint32_t, size_t, const std::byte*, size_t) override { throw torchtp::Error("the sink is broken"); }
  };
  kind.run(2, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap&) {
    const int me = exchange.rank(), peer = 1 - me;
    const std::string error = error_of([&] {
      std::shared_ptr<Sink> sink = std::make_shared<KeySink>(key_of(1, peer, me));
      if (me == 1) sink = std::make_shared<Broken>();
      exchange.finish(exchange.start({send_of(1, me, peer, 64)}, {{peer, 64, sink}}));
      exchange.finish(exchange.start({}, {{peer, 64, std::make_shared<KeySink>(0)}}));
    });
    CHECK_CONTAINS(error, "the sink is broken");
  });
}

// What a sink holds may come back to the exchange (or wait for somebody who does) while it goes away.
void sinks_may_use_the_exchange_when_they_go(const Kind& kind) {
  class Last final : public Sink {
   public:
    explicit Last(Exchange& exchange) : exchange_(exchange) {}
    ~Last() override { exchange_.finish(exchange_.start({}, {})); }
    void write(uint32_t, size_t, const std::byte*, size_t) override {}

   private:
    Exchange& exchange_;
  };
  kind.run(2, kLong, [](Exchange& exchange, torchtp::shm::Bootstrap&) {
    const int peer = 1 - exchange.rank();
    const uint64_t ticket =
        exchange.start({send_of(1, exchange.rank(), peer, 64)}, {{peer, 64, std::make_shared<Last>(exchange)}});
    exchange.finish(ticket);
  });
}

}  // namespace

int main() {
  const std::vector<std::pair<std::string, void (*)(const Kind&)>> tests = {
      {"small messages", small_messages},
      {"messages larger than a ring", messages_larger_than_a_ring},
      {"a chain of neighbours", a_chain_of_neighbours},
      {"finishing backwards", finishing_backwards},
      {"two messages for one peer keep their order", two_messages_for_one_peer_keep_their_order},
      {"a start alone delivers what fits", a_start_alone_delivers_what_fits},
      {"sizes that differ are an error", sizes_that_differ_are_an_error},
      {"an exchange left out is an error", an_exchange_left_out_is_an_error},
      {"a peer that left is an error", a_peer_that_left_is_an_error},
      {"leaving does not take back", leaving_does_not_take_back},
      {"abort is an error for who waits", abort_is_an_error_for_who_waits},
      {"a deadline is an error", a_deadline_is_an_error},
      {"sinks may use the exchange when they go", sinks_may_use_the_exchange_when_they_go},
      {"an error in a sink reaches everybody", an_error_in_a_sink_reaches_everybody},
  };
  std::vector<torchtp::test::Case> cases;
  for (const Kind& kind : kinds()) {
    for (const auto& [name, body] : tests) {
      cases.emplace_back(kind.name + ": " + name, [&kind, body = body] { body(kind); });
    }
  }
  return torchtp::test::run(cases);
}
