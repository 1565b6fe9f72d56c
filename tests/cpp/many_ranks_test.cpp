// Every collective on as many ranks as a group can have, and on an odd number of them that no power of two divides.

#include "check.h"
#include "collectives/allgather.h"
#include "collectives/allreduce.h"
#include "collectives/alltoall.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/gather.h"
#include "collectives/reduce.h"
#include "collectives/reduce_scatter.h"
#include "collectives/scatter.h"
#include "ranks.h"
#include "shm/mailbox.h"

using torchtp::test::error_of;
using torchtp::test::run_threads;
using namespace torchtp;

namespace {

constexpr auto kInt = c10::ScalarType::Int;
using Numbers = std::vector<int32_t>;

std::shared_ptr<shm::Group> make(shm::Bootstrap& bootstrap) {
  shm::GroupOptions options;
  options.heap_bytes = size_t{1} << 20;
  options.slot_bytes = size_t{64} << 10;
  options.ring_bytes = options.mailbox_bytes = size_t{64} << 10;
  return shm::Group::create(bootstrap, options);
}

std::byte* bytes(Numbers& numbers, int64_t from = 0) { return reinterpret_cast<std::byte*>(numbers.data() + from); }

// `count` numbers of each rank, one after the other.
template <typename Byte>
std::vector<Byte*> parts(Numbers& numbers, int64_t count) {
  std::vector<Byte*> found;
  for (int64_t begin = 0; begin < static_cast<int64_t>(numbers.size()); begin += count) {
    found.push_back(bytes(numbers, begin));
  }
  return found;
}

// What rank r has at place i, another number wherever r or i is another.
int32_t number(int r, int64_t i) { return static_cast<int32_t>(r * 1'000'003 + i); }

int32_t sum(int size, int64_t i) {
  int32_t total = 0;
  for (int r = 0; r < size; ++r) total += number(r, i);
  return total;
}

void every_collective(int size, int64_t count) {
  run_threads(size, [&](shm::Bootstrap& bootstrap) {
    const auto group = make(bootstrap);
    const int rank = group->rank(), root = size - 2;
    uint64_t sequence = 0;
    const auto next = [&] { return collectives::Call{*group, ++sequence}; };
    Numbers own(count), all(count * size), result(count);
    const auto fill = [&] {
      for (int64_t i = 0; i < count; ++i) own[i] = number(rank, i);
      for (int64_t i = 0; i < count * size; ++i) all[i] = number(rank, i);
    };

    fill();
    collectives::allreduce(next(), bytes(own), count, kInt, collectives::ReduceOp::kSum);
    for (int64_t i = 0; i < count; ++i) CHECK_EQUAL(own[i], sum(size, i));

    fill();
    collectives::reduce(next(), bytes(own), count, kInt, collectives::ReduceOp::kSum, root);
    for (int64_t i = 0; rank == root && i < count; ++i) CHECK_EQUAL(own[i], sum(size, i));

    fill();
    collectives::broadcast(next(), bytes(own), count, kInt, root);
    for (int64_t i = 0; i < count; ++i) CHECK_EQUAL(own[i], number(root, i));

    fill();
    collectives::allgather(next(), bytes(own), parts<std::byte>(all, count), count, kInt);
    for (int64_t i = 0; i < count * size; ++i) CHECK_EQUAL(all[i], number(static_cast<int>(i / count), i % count));

    fill();
    collectives::gather(next(), bytes(own), parts<std::byte>(all, count), count, kInt, root);
    for (int64_t i = 0; rank == root && i < count * size; ++i) {
      CHECK_EQUAL(all[i], number(static_cast<int>(i / count), i % count));
    }

    fill();
    collectives::scatter(next(), parts<const std::byte>(all, count), bytes(result), count, kInt, root);
    for (int64_t i = 0; i < count; ++i) CHECK_EQUAL(result[i], number(root, rank * count + i));

    fill();
    collectives::reduce_scatter(next(), parts<const std::byte>(all, count), bytes(result), count, kInt,
                                collectives::ReduceOp::kSum);
    for (int64_t i = 0; i < count; ++i) CHECK_EQUAL(result[i], sum(size, rank * count + i));

    fill();
    Numbers received(count * size);
    const std::vector<size_t> sizes(size, count * sizeof(int32_t));
    collectives::alltoall(next(), parts<const std::byte>(all, count), sizes, parts<std::byte>(received, count), sizes,
                          kInt);
    for (int64_t i = 0; i < count * size; ++i) {
      CHECK_EQUAL(received[i], number(static_cast<int>(i / count), rank * count + i % count));
    }
    collectives::barrier(next());
    group->leave();
  });
}

// Everybody to everybody at once, each of another size; then around the ring.
void messages_between_all(int size) {
  run_threads(size, [&](shm::Bootstrap& bootstrap) {
    const auto group = make(bootstrap);
    const int rank = group->rank();
    shm::Mailbox mailbox(group);
    const auto count = [&](int from, int to) { return static_cast<size_t>((from * 7 + to * 3) % 100); };
    std::vector<Numbers> out(size), in(size);
    std::vector<shm::Mailbox::Ticket> tickets;
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      in[peer].resize(count(peer, rank));
      out[peer].assign(count(rank, peer), number(rank, peer));
      tickets.push_back(mailbox.post_recv(peer, 5, in[peer].data(), in[peer].size() * sizeof(int32_t)));
      tickets.push_back(mailbox.post_send(peer, 5, out[peer].data(), out[peer].size() * sizeof(int32_t)));
    }
    for (const auto ticket : tickets) mailbox.wait(ticket);
    for (int peer = 0; peer < size; ++peer) {
      for (const int32_t value : in[peer]) CHECK_EQUAL(value, number(peer, rank));
    }
    int32_t token = 0;
    if (rank != 0) mailbox.wait(mailbox.post_recv(rank - 1, 6, &token, sizeof(token)));
    CHECK_EQUAL(token, rank);
    ++token;
    if (rank != size - 1) mailbox.send(rank + 1, 6, &token, sizeof(token));
    collectives::barrier({*group, 1});
    group->leave();
  });
}

void more_are_refused() {
  CHECK_CONTAINS(error_of([] { run_threads(shm::kMaxRanks + 1, [](shm::Bootstrap& b) { make(b); }); }),
                 "it has 65 ranks, at most 64 are possible");
}

// A last one that calls something else is named by everybody.
void who_differs_is_named_by_all() {
  run_threads(shm::kMaxRanks, [](shm::Bootstrap& bootstrap) {
    const auto group = make(bootstrap);
    const bool is_last = group->rank() == shm::kMaxRanks - 1;
    Numbers numbers(is_last ? 11 : 10);
    const auto call = [&] {
      collectives::allreduce({*group, 1}, bytes(numbers), static_cast<int64_t>(numbers.size()), kInt,
                             collectives::ReduceOp::kSum);
    };
    CHECK_CONTAINS(error_of(call), "rank 63");
  });
}

}  // namespace

int main() {
  return torchtp::test::run({
      {"every collective on 64 ranks, small", [] { every_collective(shm::kMaxRanks, 5); }},
      {"every collective on 64 ranks, in parts", [] { every_collective(shm::kMaxRanks, 3000); }},
      {"every collective on 37 ranks", [] { every_collective(37, 1500); }},
      {"messages between 64 ranks", [] { messages_between_all(shm::kMaxRanks); }},
      {"more ranks are refused", more_are_refused},
      {"who differs is named by all", who_differs_is_named_by_all},
  });
}
