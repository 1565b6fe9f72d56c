// What must not happen when shared memory, or what ranks say while a group is made, holds anything at all: a crash, an
// access out of bounds, a hang. Runs a fixed number of steps; hostile_test [factor [seed]] runs more.

#include <sched.h>

#include <cstring>
#include <random>
#include <utility>

#include "check.h"
#include "collectives/allreduce.h"
#include "collectives/alltoall.h"
#include "core/error.h"
#include "exchange/shm_exchange.h"
#include "processes.h"
#include "shm/group.h"
#include "shm/handover.h"
#include "shm/layout.h"
#include "shm/mailbox.h"
#include "shm/ring.h"

using torchtp::Error;
using namespace torchtp;
using namespace torchtp::shm;
using std::chrono::milliseconds;

namespace {

int factor = 1;
unsigned seed = 1;

GroupOptions options() {
  GroupOptions options;
  options.slot_bytes = 4096;
  options.heap_bytes = size_t{1} << 20;
  options.ring_bytes = 4096;
  options.mailbox_bytes = 4096;
  options.timeout = milliseconds(400);
  options.name = "hostile";
  options.describe = collectives::describe;
  options.warn = [](const std::string&) {};
  return options;
}

// However slow the machine is: the timeout is that of the calls.
std::shared_ptr<Group> make(Bootstrap& bootstrap, GroupOptions options) {
  const milliseconds timeout = std::exchange(options.timeout, std::chrono::minutes(1));
  auto group = Group::create(bootstrap, std::move(options));
  group->set_timeout(timeout);
  return group;
}

// Errors of ours and of the standard library are answers; everything else ends the process.
template <typename Step>
bool survives(const Step& step) {
  try {
    step();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Changes bytes, cuts, repeats: what a broken or malicious rank might say.
std::string mutated(std::string text, std::mt19937& random) {
  for (unsigned i = random() % 4 + 1; i > 0; --i) {
    const size_t at = text.empty() ? 0 : random() % text.size();
    switch (random() % 6) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(random());
        break;
      case 1:
        text.resize(at);
        break;
      case 2:
        text.insert(at, text.substr(at / 2, random() % 40));
        break;
      case 3:
        if (!text.empty()) text[at] = "0123456789- +"[random() % 13];
        break;
      case 4:
        text.insert(at, std::to_string(static_cast<int64_t>(uint64_t{random()} << random() % 48)));
        break;
      default:
        text.erase(at, random() % 8);
    }
  }
  text.resize(std::min<size_t>(text.size(), 1900));
  return text;
}

class Fuzzed final : public Bootstrap {
 public:
  Fuzzed(Bootstrap& inner, int step, std::mt19937& random) : inner_(inner), step_(step), random_(random) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::vector<std::string> all_gather(const std::string& mine) override {
    std::string said = step_-- == 0 ? mutated(mine, random_) : mine;
    std::replace(said.begin(), said.end(), '\0', '0');  // the tests' pages hold texts that end with a zero
    return inner_.all_gather(said);
  }
  void watch(std::function<bool(int)> has_died) override { inner_.watch(std::move(has_died)); }

 private:
  Bootstrap& inner_;
  int step_;
  std::mt19937& random_;
};

// One rank says nonsense in one step of the creation. Either all make a group that works or none does.
void nonsense_while_a_group_is_made() {
  for (int trial = 0; trial < 60 * factor; ++trial) {
    test::run_processes(2, [&](Bootstrap& bootstrap) {
      std::mt19937 random(seed + trial);
      const int liar = random() % 2, step = random() % 6;
      Fuzzed fuzzed(bootstrap, bootstrap.rank() == liar ? step : -1, random);
      survives([&] {
        const auto group = Group::create(fuzzed, options());
        group->round({});
      });
    });
  }
}

// Greetings of anybody, in any length, sent to the socket where the segment is handed out.
void nonsense_at_the_socket() {
  std::mt19937 random(seed);
  for (int trial = 0; trial < 40 * factor; ++trial) {
    Handover handover;
    const std::string address = handover.address();
    std::vector<std::unique_ptr<Receiver>> strangers;
    for (int i = 0; i < 5; ++i) {
      const std::string greeting = mutated(address.substr(32), random);
      if (greeting == address.substr(32)) continue;
      survives([&] { strangers.push_back(std::make_unique<Receiver>(address.substr(0, 32) + greeting)); });
    }
    Receiver honest(address);
    const Fd file = Fd::memory("hostile");
    handover.serve(file, 1, Deadline(milliseconds(2000)));
    CHECK(static_cast<bool>(honest.receive(Deadline(milliseconds(2000)))));
  }
}

const std::vector<uint64_t>& telling_values() {
  static const std::vector<uint64_t> values = {0,
                                               1,
                                               2,
                                               63,
                                               64,
                                               65,
                                               4032,
                                               4096,
                                               4160,
                                               8192,
                                               uint64_t{1} << 31,
                                               uint64_t{1} << 32,
                                               uint64_t{1} << 63,
                                               ~uint64_t{0},
                                               ~uint64_t{63}};
  return values;
}

// Ring positions of any value: an error, or bytes that lie in the ring.
void nonsense_in_ring_positions() {
  std::mt19937_64 random(seed);
  const SegmentSizes sizes{2, 4096, 4096, 16384, 4096};
  for (int trial = 0; trial < 3000 * factor; ++trial) {
    const auto segment = std::make_shared<Segment>(sizes);
    RingControl& control = segment->ring_control(Channel::kMailbox, 0, 1);
    const auto any = [&] {
      const auto& values = telling_values();
      return random() % 3 ? values[random() % values.size()] + (random() % 3 - 1) * 64 : random();
    };
    std::byte* const ring = segment->ring(Channel::kMailbox, 0, 1);
    survives([&] {
      RingWriter writer(segment, Channel::kMailbox, 0, 1);
      RingReader reader(segment, Channel::kMailbox, 0, 1);
      for (int i = 0; i < 6; ++i) {
        std::atomic<uint64_t>* const words[] = {&control.head, &control.tail, &control.restart_from,
                                                &control.restart_at};
        words[random() % 4]->store(any());
        if (random() % 2) writer.begin_message(random() % 20000);
        size_t room = random() % 20000;
        std::byte* const place = writer.room(room);
        CHECK(place >= ring && place + room <= ring + 16384);
        std::memset(place, 1, room);
        writer.publish(room);
        size_t news = 0;
        const std::byte* const come = reader.news(news);
        CHECK(news == 0 || (come >= ring && come + news <= ring + 16384 && news >= kRingUnit));
        if (news != 0) reader.consume(kRingUnit);
      }
    });
  }
}

class Bytes final : public exchange::Source, public exchange::Sink {
 public:
  explicit Bytes(size_t num_bytes) : bytes_(num_bytes) {}
  void read(size_t offset, std::byte* out, size_t num_bytes) const override {
    CHECK(offset + num_bytes <= bytes_.size());
    std::memcpy(out, bytes_.data() + offset, num_bytes);
  }
  void write(uint32_t, size_t offset, const std::byte* in, size_t num_bytes) override {
    CHECK(offset + num_bytes <= bytes_.size());
    std::memcpy(bytes_.data() + offset, in, num_bytes);
  }

 private:
  std::vector<std::byte> bytes_;
};

void talk(const std::shared_ptr<Group>& group) {
  const int rank = group->rank(), peer = 1 - rank;
  std::vector<float> memory(20'000);
  auto* const heap = reinterpret_cast<float*>(group->allocate(memory.size() * sizeof(float)));
  exchange::ShmExchange exchange(group);
  Mailbox mailbox(group);
  for (uint64_t step = 1; step < 60; ++step) {
    for (float* const data : {memory.data(), heap}) {
      collectives::allreduce({*group, step}, reinterpret_cast<std::byte*>(data), static_cast<int64_t>(memory.size()),
                             c10::ScalarType::Float, collectives::ReduceOp::kSum);
    }
    auto* const bytes = reinterpret_cast<std::byte*>(memory.data());
    collectives::alltoall({*group, step}, {bytes, bytes + 30'000}, {30'000, 30'000}, {bytes, bytes + 30'000},
                          {30'000, 30'000}, c10::ScalarType::Byte);
    exchange.finish(exchange.start({{peer, 0, 9000, std::make_shared<Bytes>(9000)}},
                                   {{peer, 9000, std::make_shared<Bytes>(9000)}}));
    char message[5000] = {};
    const auto sending = mailbox.post_send(peer, static_cast<int32_t>(step % 3), message, sizeof(message));
    char answer[5000];
    mailbox.recv(peer, static_cast<int32_t>(step % 3), answer, sizeof(answer));
    mailbox.wait(sending);
  }
}

size_t pages(size_t num_bytes) { return (num_bytes + kPage - 1) / kPage * kPage; }

std::byte* slots_of(const Group& group) { return std::min(group.slot(0), group.peer_slot(0)); }

std::byte* boards_of(const Group& group) {
  return slots_of(group) - pages(8 * sizeof(RingControl)) - pages(2 * sizeof(Board));
}

// Rank 2 writes over what ranks 0 and 1 have told of the bytes between them: so many rounds would never end.
void nonsense_in_the_sizes_of_an_alltoall() {
  test::run_processes(3, [](Bootstrap& bootstrap) {
    const auto group = make(bootstrap, options());
    std::vector<std::byte> sent(300), received(300);
    const auto pieces = [](std::vector<std::byte>& of) {
      return std::vector{of.data(), of.data() + 100, of.data() + 200};
    };
    const auto inputs = pieces(sent);
    if (group->rank() == 2) {
      auto* const sends = reinterpret_cast<std::atomic<uint64_t>*>(group->slot(0)) + 1;
      auto* const expects = reinterpret_cast<std::atomic<uint64_t>*>(group->slot(1)) + 3;
      while (sends->load() != 100 || expects->load() != 100) sched_yield();
      for (auto* const each : {sends, expects}) each->store(uint64_t{1} << 60);
    }
    CHECK(!survives([&] {
      collectives::alltoall({*group, 1}, {inputs.begin(), inputs.end()}, {100, 100, 100}, pieces(received),
                            {100, 100, 100}, c10::ScalarType::Byte);
    }));
  });
}

// Rank 1 is missing, and where it waits may be anything: rank 0's report is text.
void nonsense_on_a_board() {
  for (int trial = 0; trial < 40 * factor; ++trial) {
    test::run_processes(2, [&](Bootstrap& bootstrap) {
      std::string report;
      GroupOptions telling = options();
      telling.stall_after = milliseconds(2);
      telling.warn = [&](const std::string& text) { report = text; };
      const auto group = make(bootstrap, telling);
      if (group->rank() == 0) {
        std::mt19937_64 random(seed + trial);
        auto* const boards = reinterpret_cast<std::atomic<uint64_t>*>(boards_of(*group));
        for (size_t i = 0; i < 2 * sizeof(Board) / sizeof(uint64_t); ++i) boards[i].store(random());
        Board& theirs = reinterpret_cast<Board*>(boards)[1];
        if (trial % 8 != 0) theirs.changes.store(2);
        for (size_t i = 0; i < kToldWords; i += kToldWords / kToldWaits) {
          if (random() % 4) theirs.words[i].store(random() % 2 ? random() >> 40 : telling_values()[random() % 15]);
          if (random() % 4) theirs.words[i + 1].store(random() % 2 ? 0 : telling_values()[random() % 15]);
        }
        group->set_timeout(milliseconds(30));
        const std::string error = test::error_of([&] { group->round({}); });
        CHECK_CONTAINS(error, "rank 1 has not arrived");
        for (const char letter : report + error) CHECK(letter >= ' ' && letter <= '~');
      }
      bootstrap.all_gather("");
    });
  }
}

// A third process maps the segment and writes into what the ranks steer by while they talk: numbers near those that
// stand there, telling values, noise.
void scribble(std::byte* memory, size_t num_bytes, std::mt19937_64& random) {
  for (int i = 0; i < 4; ++i) {
    auto* const word = reinterpret_cast<std::atomic<uint64_t>*>(memory + random() % (num_bytes / 8) * 8);
    const auto& values = telling_values();
    switch (random() % 3) {
      case 0:
        word->store(word->load() + (random() % 5 - 2) * 64);
        break;
      case 1:
        word->store(values[random() % values.size()]);
        break;
      default:
        word->store(random());
    }
  }
}

void scribbling_while_ranks_talk() {
  for (int trial = 0; trial < 15 * factor; ++trial) {
    test::run_processes(2, [&](Bootstrap& bootstrap) {
      const auto group = make(bootstrap, options());
      // The last rank's own child scribbles: it has the segment mapped, as any rank has.
      std::mt19937_64 random(seed + 77 * trial);
      bootstrap.all_gather("");
      pid_t scribbler = 0;
      if (bootstrap.rank() == 1 && (scribbler = fork()) == 0) {
        alarm(20);
        // In the segment: control, boards, positions of the rings, slots, rings.
        std::byte* const slots = slots_of(*group);
        const size_t positions = pages(8 * sizeof(RingControl));
        std::byte* const control = boards_of(*group) - pages(sizeof(Control));
        const int where = trial % 3;
        for (;;) {
          if (where == 0) scribble(control, offsetof(Control, ranks) + 2 * sizeof(RankControlOf<Processes>), random);
          if (where == 1) scribble(slots - positions, 8 * sizeof(RingControl), random);
          if (where == 2) scribble(slots, size_t{48} << 10, random);
          usleep(random() % 200);
        }
      }
      survives([&] { talk(group); });
      survives([&] { group->abort("done"); });
      survives([&] { group->round({}); });
      if (scribbler != 0) {
        kill(scribbler, SIGKILL);
        waitpid(scribbler, nullptr, 0);
      }
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) factor = std::atoi(argv[1]);
  if (argc > 2) seed = static_cast<unsigned>(std::atoi(argv[2]));
  return test::run({
      {"nonsense while a group is made", nonsense_while_a_group_is_made},
      {"nonsense at the socket", nonsense_at_the_socket},
      {"nonsense in ring positions", nonsense_in_ring_positions},
      {"nonsense in the sizes of an alltoall", nonsense_in_the_sizes_of_an_alltoall},
      {"nonsense on a board", nonsense_on_a_board},
      {"scribbling while ranks talk", scribbling_while_ranks_talk},
  });
}
