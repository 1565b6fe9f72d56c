// Ranks of the floors without torch, as processes without an interpreter, that time a collective when asked to.
//
//     floors SIZE FOLDER
//
// Rank r reads commands from FOLDER/in<r> and answers in FOLDER/out<r>, a line each. A command is "OP PLACE DTYPE BYTES
// INNER": the answer is the seconds of one call, the mean of INNER calls; with INNER 0 the result is checked instead.
// With a + after PLACE every rank writes its input before every call, as a network does, and waits for the others; that
// is not timed. Without it what a rank reads may still lie in its own cache from the call before.
// "idle" answers with the processor time the rank has used since the last "idle", "end" ends. The first line is the
// seconds from before the ranks were started until their group had its first round. The op "record" is what the backend
// does to keep a call and its statistics, without the call; "record_message" the same of a message.
#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>

#include "backend/record.h"
#include "collectives/allgather.h"
#include "collectives/allreduce.h"
#include "collectives/alltoall.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/reduce_scatter.h"
#include "core/clock.h"
#include "processes.h"
#include "shm/mailbox.h"

namespace {

using namespace torchtp;
using collectives::Call;
using Clock = std::chrono::steady_clock;

constexpr size_t kMostBytes = size_t{64} << 20;
constexpr size_t kHeapBytes = 2 * kMostBytes + (size_t{1} << 20);

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) { return time.tv_sec + 1e-6 * time.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// What a call reads and writes: the larger of the two has `num_bytes`.
struct Buffers {
  std::byte* input;
  std::byte* output;
};

class Rank {
 public:
  explicit Rank(shm::Bootstrap& bootstrap)
      : group_(shm::Group::create(bootstrap, options())),
        mailbox_(group_),
        recorder_({"benchmark", group_->rank(), group_->size(), {}}) {
    run("barrier", {}, c10::ScalarType::Undefined, 0);
  }

  std::string obey(const std::string& command) {
    std::istringstream words(command);
    std::string op, place, dtype_name;
    size_t num_bytes = 0, inner = 0;
    words >> op;
    if (op == "idle") {
      const double before = std::exchange(processor_seconds_, processor_seconds());
      return std::to_string(processor_seconds_ - before);
    }
    words >> place >> dtype_name >> num_bytes >> inner;
    const c10::ScalarType dtype = dtype_of(dtype_name);
    const bool written = place.back() == '+';
    if (written) place.pop_back();
    const Buffers buffers = buffers_in(place);
    if (inner == 0) return check(op, buffers, dtype, num_bytes);
    for (int i = 0; i < (num_bytes < (1 << 20) ? 5 : 1); ++i) run(op, buffers, dtype, num_bytes);
    double seconds = 0;
    if (written) {
      for (size_t i = 0; i < inner; ++i) {
        std::memset(buffers.input, 0, num_bytes);
        run("barrier", {}, dtype, 0);
        const auto start = Clock::now();
        run(op, buffers, dtype, num_bytes);
        seconds += seconds_since(start);
      }
    } else {
      const auto start = Clock::now();
      for (size_t i = 0; i < inner; ++i) run(op, buffers, dtype, num_bytes);
      seconds = seconds_since(start);
    }
    std::ostringstream text;
    text << std::scientific << seconds / static_cast<double>(inner);
    return text.str();
  }

 private:
  static shm::GroupOptions options() {
    shm::GroupOptions options;
    options.heap_bytes = kHeapBytes;
    options.name = "benchmark";
    options.describe = collectives::describe;
    return options;
  }

  static c10::ScalarType dtype_of(const std::string& name) {
    if (name == "bf16") return c10::ScalarType::BFloat16;
    return name == "fp16" ? c10::ScalarType::Half : c10::ScalarType::Float;
  }

  Buffers buffers_in(const std::string& place) {
    if (place == "segment") {
      if (segment_.input == nullptr) segment_ = {group_->allocate(kMostBytes), group_->allocate(kMostBytes)};
      return segment_;
    }
    if (!memory_) memory_ = std::make_unique<Mapping>(2 * kMostBytes);
    return {memory_->data(), memory_->data() + kMostBytes};
  }

  void run(const std::string& op, const Buffers& buffers, c10::ScalarType dtype, size_t num_bytes) {
    const Call call{*group_, ++sequence_};
    const int rank = group_->rank(), size = group_->size();
    std::byte *const input = buffers.input, *const output = buffers.output;
    if (op == "barrier") return collectives::barrier(call);
    const auto count = static_cast<int64_t>(num_bytes / c10::elementSize(dtype));
    const auto parts = [&](auto* data) {
      std::vector<decltype(data)> pointers;
      for (int r = 0; r < size; ++r) pointers.push_back(data + r * (num_bytes / size));
      return pointers;
    };
    const std::byte* const source = input;
    if (op == "allreduce") {
      collectives::allreduce(call, input, count, dtype, collectives::ReduceOp::kSum);
    } else if (op == "broadcast") {
      collectives::broadcast(call, input, count, dtype, static_cast<int>(sequence_ % size));
    } else if (op == "allgather") {
      collectives::allgather(call, source, parts(output), count / size, dtype);
    } else if (op == "reduce_scatter") {
      collectives::reduce_scatter(call, parts(source), output, count / size, dtype, collectives::ReduceOp::kSum);
    } else if (op == "alltoall") {
      const std::vector<size_t> sizes(size, num_bytes / size);
      collectives::alltoall(call, parts(source), sizes, parts(output), sizes, dtype);
    } else if (op == "pair") {
      const auto incoming = mailbox_.post_recv(rank ^ 1, 0, output, num_bytes);
      mailbox_.send(rank ^ 1, 0, input, num_bytes);
      mailbox_.wait(incoming);
    } else if (op == "record") {
      backend::Operation operation;
      operation.sequence = sequence_;
      operation.op = "allreduce";
      operation.num_bytes = static_cast<int64_t>(num_bytes);
      const uint64_t number = recorder_.call(operation);
      recorder_.start(number);
      recorder_.end(number, "", group_->arrivals());
    } else if (op == "record_message") {
      backend::Operation operation;
      operation.kind = backend::Operation::Kind::kMessage;
      operation.op = "recv";
      operation.num_bytes = static_cast<int64_t>(num_bytes);
      operation.peer = rank ^ 1;
      operation.called_ns = operation.started_ns = now_ns();
      const uint64_t number = recorder_.call(operation);
      recorder_.end(number, "", backend::Meeting{now_ns() - operation.called_ns, 1, rank ^ 1, 1});
    } else if (op == "copy") {
      std::memcpy(output, input, num_bytes);
    } else if (op == "stream") {
      stream_copy(output, input, num_bytes);
    } else {
      throw std::runtime_error("no collective is called " + op);
    }
  }

  // Every rank passes its rank + 1 in all elements (fp32).
  std::string check(const std::string& op, const Buffers& buffers, c10::ScalarType dtype, size_t num_bytes) {
    const int rank = group_->rank(), size = group_->size();
    const size_t count = num_bytes / sizeof(float);
    auto* const input = reinterpret_cast<float*>(buffers.input);
    auto* const output = reinterpret_cast<float*>(buffers.output);
    std::fill(input, input + count, static_cast<float>(rank + 1));
    run(op, buffers, dtype, num_bytes);
    const bool in_place = op == "allreduce" || op == "broadcast";
    const size_t num_results = op == "reduce_scatter" ? count / size : count;
    std::string answer = "right";
    for (size_t i = 0; i < num_results; ++i) {
      int wanted = size * (size + 1) / 2;
      if (op == "broadcast") wanted = static_cast<int>(sequence_ % size) + 1;
      if (op == "allgather" || op == "alltoall") wanted = static_cast<int>(i / (count / size)) + 1;
      if (op == "pair") wanted = (rank ^ 1) + 1;
      if (op == "copy" || op == "stream") wanted = rank + 1;
      if ((in_place ? input : output)[i] != static_cast<float>(wanted)) answer = "wrong";
    }
    std::fill(input, input + count, 0.0f);
    return answer;
  }

  std::shared_ptr<shm::Group> group_;
  shm::Mailbox mailbox_;
  backend::Recorder recorder_;
  std::unique_ptr<Mapping> memory_;
  Buffers segment_{};
  uint64_t sequence_ = 0;
  double processor_seconds_ = 0;
};

void serve(shm::Bootstrap& bootstrap, const std::string& folder, Clock::time_point start) {
  Rank rank(bootstrap);
  const double until_ready = seconds_since(start);
  std::ifstream commands(folder + "/in" + std::to_string(bootstrap.rank()));
  std::ofstream answers(folder + "/out" + std::to_string(bootstrap.rank()));
  answers << until_ready << std::endl;
  for (std::string line; std::getline(commands, line) && line != "end";) answers << rank.obey(line) << std::endl;
}

}  // namespace

int main(int, char** arguments) {
  const int size = std::stoi(arguments[1]);
  const size_t num_bytes = size * sizeof(test::ProcessBootstrap::Page);
  const Fd file = Fd::memory("pages");
  if (ftruncate(file.get(), static_cast<off_t>(num_bytes)) != 0) return 1;
  const Mapping pages(file, num_bytes);
  const auto start = Clock::now();
  for (int rank = 0; rank < size; ++rank) {
    if (fork() != 0) continue;
    int status = 0;
    try {
      test::ProcessBootstrap bootstrap(pages.data(), rank, size);
      serve(bootstrap, arguments[2], start);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      status = 1;
    }
    _exit(status);
  }
  int failed = 0;
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    wait(&status);
    failed |= status;
  }
  return failed == 0 ? 0 : 1;
}
