// The parts below a group: the sealed file, how it is handed over, rings that are damaged.

#include "shm/segment.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <random>

#include "check.h"
#include "core/error.h"
#include "ranks.h"
#include "shm/handover.h"
#include "shm/liveness.h"
#include "shm/ring.h"

using torchtp::Deadline;
using torchtp::Fd;
using torchtp::test::error_of;
using namespace torchtp::shm;

namespace {

constexpr SegmentSizes kSizes{2, 4096, 8192, 4096, 1 << 20};

Deadline soon() { return Deadline(std::chrono::seconds(20)); }

void a_segment_is_sparse() {
  const Segment segment(kSizes);
  struct stat before{}, after{};
  CHECK_EQUAL(fstat(segment.file().get(), &before), 0);
  CHECK(before.st_blocks * 512 < before.st_size / 2);
  segment.reserve(segment.heap(1), 64 * kPage);
  CHECK_EQUAL(fstat(segment.file().get(), &after), 0);
  CHECK_EQUAL(after.st_blocks * 512 - before.st_blocks * 512, static_cast<long>(64 * kPage));
  segment.release(segment.heap(1), 64 * kPage);
  CHECK_EQUAL(fstat(segment.file().get(), &after), 0);
  CHECK_EQUAL(after.st_blocks, before.st_blocks);
}

void parts_do_not_overlap() {
  const Segment segment(kSizes);
  std::vector<std::pair<std::byte*, size_t>> parts = {
      {reinterpret_cast<std::byte*>(&segment.control()), sizeof(Control)}};
  for (int a = 0; a < 2; ++a) {
    parts.emplace_back(segment.heap(a), size_t{1} << 20);
    parts.emplace_back(reinterpret_cast<std::byte*>(&segment.board(a)), sizeof(Board));
    for (int b = 0; b < 2; ++b) {
      parts.emplace_back(segment.slot(a, b), size_t{4096});
      for (const Channel channel : {Channel::kExchange, Channel::kMailbox}) {
        parts.emplace_back(segment.ring(channel, a, b), segment.ring_bytes(channel));
        parts.emplace_back(reinterpret_cast<std::byte*>(&segment.ring_control(channel, a, b)), sizeof(RingControl));
      }
    }
  }
  std::sort(parts.begin(), parts.end());
  for (size_t i = 1; i < parts.size(); ++i) CHECK(parts[i - 1].first + parts[i - 1].second <= parts[i].first);
}

void unsealed_or_wrong_files_are_refused() {
  Fd unsealed = Fd::memory("unsealed");
  CHECK_EQUAL(ftruncate(unsealed.get(), 100 << 20), 0);
  CHECK_CONTAINS(error_of([&] { Segment(std::move(unsealed), kSizes); }), "expected a sealed one");
  const Segment other({2, 4096, 8192, 4096, 1 << 21});
  CHECK_CONTAINS(error_of([&] { Segment(Fd(dup(other.file().get())), kSizes); }), "expected a sealed one");
}

void strangers_do_not_get_the_file() {
  const Segment segment(kSizes);
  Handover handover;
  const std::string address = handover.address();
  Receiver stranger(address.substr(0, 32) + std::string(32, '0'));
  Receiver first(address), second(address);
  handover.serve(segment.file(), 2, soon());
  const Segment copy(first.receive(soon()), kSizes);
  *segment.heap(1) = std::byte{42};
  CHECK(*copy.heap(1) == std::byte{42});
  CHECK(static_cast<bool>(second.receive(soon())));
  CHECK_CONTAINS(error_of([&] { stranger.receive(soon()); }), "hung up");
  CHECK(Handover().address() != Handover().address());
}

void nobody_waits_for_who_does_not_come() {
  const Segment segment(kSizes);
  Handover handover, other;
  const Deadline now(std::chrono::milliseconds(0));
  CHECK_CONTAINS(error_of([&] { handover.serve(segment.file(), 1, now); }), "deadline passed");
  CHECK_CONTAINS(error_of([&] { Receiver(other.address()).receive(now); }), "deadline passed");
  CHECK_CONTAINS(error_of([] { Receiver("too short"); }), "no address");
  CHECK_CONTAINS(error_of([] { Receiver(std::string(64, 'a')); }), "cannot reach rank 0");
}

void nobody_waits_for_who_has_died() {
  const Segment segment(kSizes);
  Handover handover, failing;
  {
    const Receiver dead(handover.address());
  }
  Receiver alive(handover.address()), first(failing.address()), second(failing.address());
  handover.serve(segment.file(), 2, soon());
  CHECK(static_cast<bool>(alive.receive(soon())));
  CHECK_CONTAINS(error_of([&] { failing.serve(Fd(), 2, soon()); }), "cannot hand over the segment");
  for (Receiver* const each : {&first, &second}) {
    CHECK_CONTAINS(error_of([&] { each->receive(soon()); }), "hung up");
  }
}

void more_descriptors_than_one_are_closed() {
  const std::string address(64, 'a');
  const Fd rank_zero = Fd::unix_socket();
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const std::string path = "torchtp-" + address.substr(0, 32);
  path.copy(name.sun_path + 1, path.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  CHECK_EQUAL(bind(rank_zero.get(), reinterpret_cast<sockaddr*>(&name), length), 0);
  CHECK_EQUAL(listen(rank_zero.get(), 1), 0);
  Receiver receiver(address);
  const Fd peer = Fd::accept(rank_zero);
  const Fd next(dup(peer.get()));  // the number that the next descriptor would have, too, if nothing stays open
  const int two[] = {peer.get(), peer.get()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(two))] = {};
  char byte = 0;
  iovec part{&byte, 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const entry = CMSG_FIRSTHDR(&message);
  entry->cmsg_level = SOL_SOCKET;
  entry->cmsg_type = SCM_RIGHTS;
  entry->cmsg_len = CMSG_LEN(sizeof(two));
  std::memcpy(CMSG_DATA(entry), two, sizeof(two));
  CHECK_EQUAL(sendmsg(peer.get(), &message, 0), ssize_t{1});
  CHECK_CONTAINS(error_of([&] { receiver.receive(soon()); }), "more than the segment");
  CHECK_EQUAL(Fd(dup(peer.get())).get(), next.get() + 1);
}

// Long enough for messages to start over at its beginning.
constexpr SegmentSizes kWithLongRings{4, 4096, 32768, 4096, 16384};

void a_ring_carries_bytes_in_order() {
  const auto segment = std::make_shared<Segment>(kWithLongRings);
  const RingControl& control = segment->ring_control(Channel::kExchange, 0, 1);
  RingWriter writer(segment, Channel::kExchange, 0, 1);
  RingReader reader(segment, Channel::kExchange, 0, 1);
  std::mt19937 random(7);
  unsigned written = 0, read = 0, restarts_when_empty = 0, restarts_when_not = 0;
  size_t left = 0;
  for (int step = 0; step < 50'000; ++step) {
    if (random() % 2) {
      if (left == 0) {
        left = random() % 20'000 + 1;
        const uint64_t before = control.restart_at;
        writer.begin_message(left);
        if (control.restart_at != before) ++(written == read ? restarts_when_empty : restarts_when_not);
      }
      size_t room = std::min<size_t>(left, random() % 3000 + 1);
      const size_t asked = room;
      std::byte* const place = writer.room(room);
      CHECK(room % kRingUnit == 0 && room < asked + kRingUnit);
      for (size_t i = 0; i < room; i += kRingUnit) *reinterpret_cast<unsigned*>(place + i) = written++;
      if (room > 0) writer.publish(room);
      left -= std::min(left, room);
    } else {
      size_t news = 0;
      const std::byte* const place = reader.news(news);
      if (random() % 2) news = std::min(news, kRingUnit * 3);
      for (size_t i = 0; i < news; i += kRingUnit) {
        CHECK_EQUAL(*reinterpret_cast<const unsigned*>(place + i), read);
        ++read;
      }
      if (news > 0) reader.consume(news);
    }
  }
  CHECK(read > 5000 && written - read <= 32768 / kRingUnit);
  CHECK(restarts_when_empty > 100 && restarts_when_not > 100);
}

void a_ring_carries_bytes_between_threads() {
  const auto segment = std::make_shared<Segment>(kWithLongRings);
  constexpr unsigned kUnits = 200'000;
  std::thread sender([&] {
    RingWriter writer(segment, Channel::kExchange, 0, 1);
    std::mt19937 random(8);
    unsigned written = 0;
    while (written < kUnits) {
      size_t left = (random() % 200 + 1) * kRingUnit;
      writer.begin_message(left);
      while (left > 0) {
        size_t room = left;
        std::byte* const place = writer.room(room);
        for (size_t i = 0; i < room; i += kRingUnit) *reinterpret_cast<unsigned*>(place + i) = written++;
        if (room > 0) writer.publish(room);
        left -= room;
        if (room == 0) std::this_thread::yield();
      }
    }
  });
  RingReader reader(segment, Channel::kExchange, 0, 1);
  unsigned read = 0;
  bool right = true;
  while (read < kUnits) {
    size_t news = 0;
    const std::byte* const place = reader.news(news);
    for (size_t i = 0; i < news; i += kRingUnit) right &= *reinterpret_cast<const unsigned*>(place + i) == read++;
    if (news > 0) reader.consume(news);
    if (news == 0) std::this_thread::yield();
  }
  sender.join();
  CHECK(right);
}

void damaged_positions_are_noticed() {
  for (const uint64_t bad : {uint64_t{65}, uint64_t{8192 + 64}, ~uint64_t{0}}) {
    const auto segment = std::make_shared<Segment>(kSizes);
    RingReader reader(segment, Channel::kExchange, 0, 1);
    segment->ring_control(Channel::kExchange, 0, 1).head.store(bad);
    size_t news = 0;
    CHECK_CONTAINS(error_of([&] { reader.news(news); }), "damaged");
  }
  for (const uint64_t bad : {uint64_t{1}, uint64_t{1} << 40}) {
    const auto segment = std::make_shared<Segment>(kSizes);
    RingWriter writer(segment, Channel::kExchange, 0, 1);
    size_t room = 8192;
    writer.room(room);
    writer.publish(room);
    segment->ring_control(Channel::kExchange, 0, 1).tail.store(bad);
    CHECK_CONTAINS(error_of([&] { writer.room(room); }), "damaged");
  }
}

void ranks_of_one_process_are_not_watched() {
  const Segment segment(kSizes);
  const std::string me = "this process";
  Liveness liveness(segment.file(), 0, {me, me, "somebody else"});
  CHECK(!liveness.watch());
  CHECK(!liveness.is_dead(0) && !liveness.is_dead(1));
  CHECK(!liveness.is_dead(2));  // no lock of it was ever seen: nothing is known
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"a segment is sparse", a_segment_is_sparse},
      {"parts do not overlap", parts_do_not_overlap},
      {"unsealed or wrong files are refused", unsealed_or_wrong_files_are_refused},
      {"strangers do not get the file", strangers_do_not_get_the_file},
      {"nobody waits for who does not come", nobody_waits_for_who_does_not_come},
      {"nobody waits for who has died", nobody_waits_for_who_has_died},
      {"more descriptors than one are closed", more_descriptors_than_one_are_closed},
      {"a ring carries bytes in order", a_ring_carries_bytes_in_order},
      {"a ring carries bytes between threads", a_ring_carries_bytes_between_threads},
      {"damaged positions are noticed", damaged_positions_are_noticed},
      {"ranks of one process are not watched", ranks_of_one_process_are_not_watched},
  });
}
