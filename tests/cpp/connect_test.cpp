// Connections between ranks, all of them over loopback: who is let in, and who calls whom. Real hosts:
// tests/test_hosts.py.
#include <sys/socket.h>

#include <atomic>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "doors.h"
#include "net/connect.h"
#include "ranks.h"

using torchtp::Deadline;
using torchtp::Fd;
using torchtp::shm::Bootstrap;
using namespace torchtp::net;
using namespace torchtp::test;

namespace {

using std::chrono::milliseconds;

using Introductions = std::vector<std::string>;
using Lines = std::map<Line, Fd>;

Fd knock(const std::string& introduction) {
  const std::string where = introduction.substr(0, introduction.rfind(' '));
  const Address address = Address::parse(where);
  Fd socket = Fd::tcp_socket(address.family());
  CHECK(connect(socket.get(), address.get(), address.length) == 0 || errno == EINPROGRESS);
  return socket;
}

// The other side of each connection is that of the same one.
void check_ends(Bootstrap& bootstrap, const Lines& made, size_t num_lines) {
  CHECK_EQUAL(made.size(), num_lines);
  for (const auto& [line, socket] : made) CHECK_EQUAL(send(socket.get(), &line.use, sizeof(line.use), 0), 4);
  bootstrap.all_gather("sent");
  for (const auto& [line, socket] : made) {
    int use = -1;
    const Deadline deadline(kSoon);
    while (recv(socket.get(), &use, sizeof(use), MSG_WAITALL) < 0 && errno == EAGAIN && !deadline.passed()) {
      std::this_thread::yield();
    }
    CHECK_EQUAL(use, line.use);
  }
  bootstrap.all_gather("");
}

// While ranks connect, anybody else says anything, or nothing, or a part of the right thing.
void strangers_do_not_get_in() {
  run_threads(3, [](Bootstrap& bootstrap) {
    const Door door(kLoopback);
    const Introductions all = bootstrap.all_gather(door.introduction());
    std::vector<Fd> strangers;
    std::mt19937 random(static_cast<unsigned>(bootstrap.rank()) + 3);
    for (int i = 0; i < 150; ++i) {
      strangers.push_back(knock(door.introduction()));
      std::string nonsense(random() % 80, '\0');
      for (char& letter : nonsense) letter = static_cast<char>(random());
      if (i % 3 == 0) nonsense = "torchtp1" + nonsense;
      [[maybe_unused]] const ssize_t sent =
          send(strangers.back().get(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (i % 5 == 0) strangers.pop_back();
    }
    bootstrap.all_gather("");
    check_ends(bootstrap, door.connect(bootstrap.rank(), lines_of(bootstrap.rank(), 3, 2), all, Deadline(kSoon)), 4);
  });
}

// Rank 0 calls while rank 1 is busy, and many strangers after it.
void strangers_drive_nobody_out() {
  run_threads(2, [](Bootstrap& bootstrap) {
    const Door door(kLoopback);
    const Introductions all = bootstrap.all_gather(door.introduction());
    std::vector<Fd> strangers;
    if (bootstrap.rank() == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      for (int i = 0; i < 200; ++i) strangers.push_back(knock(door.introduction()));
    }
    check_ends(bootstrap, door.connect(bootstrap.rank(), lines_of(bootstrap.rank(), 2, 2), all, Deadline(kSoon)), 2);
  });
}

// Rank 1 answers at another address than it says, or with another token.
void a_wrong_door_is_an_error() {
  run_threads(2, [](Bootstrap& bootstrap) {
    const Door door(kLoopback);
    Introductions all = bootstrap.all_gather(door.introduction());
    std::string& peer = all[1 - bootstrap.rank()];
    peer.replace(peer.size() - 32, 32, std::string(32, 'x'));
    const std::string error = error_of(
        [&] { door.connect(bootstrap.rank(), lines_of(bootstrap.rank(), 2, 1), all, Deadline(milliseconds(1500))); });
    CHECK_CONTAINS(error, "rank");
    CHECK_CONTAINS(error, "GLOO_SOCKET_IFNAME");
    bootstrap.all_gather("");
  });
}

void who_does_not_come_is_named() {
  const Door door(kLoopback), other(kLoopback);
  const std::string late =
      error_of([&] { door.connect(1, {{0, 0}}, {other.introduction(), ""}, Deadline(milliseconds(50))); });
  CHECK_CONTAINS(late, "waiting for rank 0 at 127.0.0.1");
  const std::string silent =
      error_of([&] { door.connect(0, {{1, 0}}, {"", other.introduction()}, Deadline(milliseconds(50))); });
  CHECK_CONTAINS(silent, "waiting for rank 1 at 127.0.0.1");
  const auto look = [] { throw torchtp::Error("rank 0 died"); };
  const Deadline far(std::chrono::hours(1));
  CHECK_CONTAINS(error_of([&] { door.connect(1, {{0, 0}}, {other.introduction(), ""}, far, look); }), "rank 0 died");
  std::string closed;
  {
    const Door gone(kLoopback);
    closed = gone.introduction();
  }
  CHECK_CONTAINS(error_of([&] { door.connect(0, {{1, 0}}, {"", closed}, Deadline(kSoon)); }),
                 "cannot connect to rank 1");
}

// Where nobody answers a call, as behind a firewall: a queue of callers that is full.
class Silence {
 public:
  Silence() : address_(own_address(kLoopback)), listener_(Fd::tcp_socket(address_.family())) {
    CHECK_EQUAL(bind(listener_.get(), address_.get(), address_.length), 0);
    CHECK_EQUAL(listen(listener_.get(), 0), 0);
    CHECK_EQUAL(getsockname(listener_.get(), address_.get(), &address_.length), 0);
    for (int i = 0; i < 8; ++i) callers_.push_back(knock(text() + " "));
  }
  std::string text() const { return address_.text(); }

 private:
  Address address_;
  const Fd listener_;
  std::vector<Fd> callers_;
};

constexpr char kNoWay[] = "fe80::1 4711";  // an error at once: of which link?

// As its introduction by somebody who names the wrong address.
std::string elsewhere(const std::string& introduction, const std::string& address) {
  return address + introduction.substr(introduction.rfind(' '));
}

void who_cannot_be_called_calls_back() {
  for (const bool silent : {true, false}) {
    for (const int deaf : {0, 1}) {
      const Silence silence;
      run_threads(2, [&](Bootstrap& bootstrap) {
        const Door door(kLoopback);
        Introductions all = bootstrap.all_gather(door.introduction());
        if (bootstrap.rank() != deaf) all[deaf] = elsewhere(all[deaf], silent ? silence.text() : kNoWay);
        const auto made = door.connect(bootstrap.rank(), lines_of(bootstrap.rank(), 2, 3), all, Deadline(kSoon));
        check_ends(bootstrap, made, 3);
      });
    }
  }
}

void no_way_in_either_direction_is_an_error() {
  run_threads(2, [](Bootstrap& bootstrap) {
    const int other = 1 - bootstrap.rank();
    const Door door(kLoopback);
    Introductions all = bootstrap.all_gather(door.introduction());
    all[other] = elsewhere(all[other], kNoWay);
    // Rank 0 has another's word for it; that reaches rank 1 through the bootstrap.
    const Deadline deadline(bootstrap.rank() == 0 ? milliseconds(60'000) : milliseconds(1500));
    const std::string error =
        error_of([&] { door.connect(bootstrap.rank(), lines_of(bootstrap.rank(), 2, 2), all, deadline); });
    CHECK_CONTAINS(error, "cannot connect to rank " + std::to_string(other) + " at fe80::1 4711: ");
    CHECK_CONTAINS(error, bootstrap.rank() == 0 ? "it has not called either" : "it had not called by the deadline");
    bootstrap.all_gather("");
  });
}

// Rank 0 comes just when rank 1 begins to call back: both calls get through, and one of them is taken.
void calls_that_cross_make_one_connection() {
  constexpr int kUses = 100;
  for (const int num_looks : {46, 48, 49, 50}) {  // of rank 1, 20 ms each and a little more
    std::atomic<bool> go{false};
    run_threads(2, [&](Bootstrap& bootstrap) {
      const Door door(kLoopback);
      const Introductions all = bootstrap.all_gather(door.introduction());
      const auto lines = lines_of(bootstrap.rank(), 2, kUses);
      int looks = 0;
      const auto look = [&] {
        if (++looks >= num_looks) go = true;
      };
      while (bootstrap.rank() == 0 && !go) std::this_thread::yield();
      check_ends(bootstrap, door.connect(bootstrap.rank(), lines, all, Deadline(kSoon), look), kUses);
    });
  }
}

void nonsense_is_no_introduction() {
  const Door door(kLoopback);
  const std::string token(32, 'a');
  for (const std::string& text : {std::string(), std::string("127.0.0.1 5"), "127.0.0.1 5 " + token + "b",
                                  "nobody.example 5 " + token, "127.0.0.1 port " + token, "1.2.3 999999 x " + token}) {
    error_of([&] { door.connect(0, {{1, 0}}, {"", text}, Deadline(kSoon)); });
  }
}

void the_interface_is_the_one_that_is_named() {
  CHECK_EQUAL(own_address("none0,lo").text(), "127.0.0.1 0");
  CHECK_THROWS(own_address("none0"), "GLOO_SOCKET_IFNAME='none0' names no network interface");
  CHECK(own_address("").length > 0);
  const Address six = Address::parse("::1 4711");
  CHECK_EQUAL(six.text(), "::1 4711");
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"strangers do not get in", strangers_do_not_get_in},
      {"strangers drive nobody out", strangers_drive_nobody_out},
      {"a wrong door is an error", a_wrong_door_is_an_error},
      {"who does not come is named", who_does_not_come_is_named},
      {"who cannot be called calls back", who_cannot_be_called_calls_back},
      {"no way in either direction is an error", no_way_in_either_direction_is_an_error},
      {"calls that cross make one connection", calls_that_cross_make_one_connection},
      {"nonsense is no introduction", nonsense_is_no_introduction},
      {"the interface is the one that is named", the_interface_is_the_one_that_is_named},
  });
}
