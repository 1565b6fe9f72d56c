#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/host_device.h"

// A kernel whose threads work together, written so that the CPU can run it too: a program is a struct of plain values
// with
//   kThreads       threads of a block, a multiple of 32
//   kStepPhases    phases that every step runs; kPhases with those that follow once; kFirstPhases, if given, are the
//                  first of all, before any step
//   State          what a thread keeps in registers from phase to phase, zeroed at the start
//   num_blocks(), shared_bytes(), num_steps(block)
//   run<phase>(place, step, state, shared)
// All threads of a block have ended a phase before any begins the next. In a phase they may not read what another one
// writes: that is all a block has to keep for the CPU, which runs them one after the other, to compute the same.
//
// A phase for which `reduces(phase)` is true ends with state.partial combined by `combine(low, high)` over teams: of
// `team` neighbouring threads those whose numbers are equal modulo `apart` (powers of two, apart at most 32). The order
// is the same on both sides, and every thread of the team has the result from there on.
//
// What a program may say beside that, for speed: `kCommutes`, that combine(a, b) is combine(b, a); `kMostTeam`, of
// threads; `meets(phase)`, who has to have ended the phase before the next one: kNobody where that reads nothing that
// other threads wrote, kWarp where it reads what threads of the same 32 wrote.
namespace torchtp::kernels {

struct Place {
  int64_t block;
  int thread;
};

enum class Meeting { kNobody, kWarp, kBlock };

inline TORCHTP_HOST_DEVICE constexpr int log2_up(int64_t value) {
  int log = 0;
  while ((int64_t{1} << log) < value) ++log;
  return log;
}

// Of shared memory known when a kernel is compiled (tests/test_ptxas.py).
constexpr int kStaticSharedBytes = 16 * 1024;
// Of shared memory that a launch may ask for beside that, on any device; a plan is told what its own device has, which
// is at least this least one (sm_86, sm_89 and sm_120 give a block 99 KiB in all).
constexpr size_t kMostSharedBytes = 200 * 1024, kLeastSharedBytes = 82 * 1024;
// Of shared memory, known and asked for together, that a launch gets without leave for more.
constexpr size_t kSharedWithoutLeave = 48 * 1024;
inline bool needs_leave(size_t shared_bytes) { return shared_bytes + kStaticSharedBytes > kSharedWithoutLeave; }

template <typename Program, typename = void>
struct Commutes : std::false_type {};
template <typename Program>
struct Commutes<Program, std::enable_if_t<Program::kCommutes>> : std::true_type {};

template <typename Program, typename = void>
struct MostTeam : std::integral_constant<int, Program::kThreads> {};
template <typename Program>
struct MostTeam<Program, std::void_t<decltype(Program::kMostTeam)>> : std::integral_constant<int, Program::kMostTeam> {
};

template <typename Program, typename = void>
struct Meetings {
  static constexpr Meeting after(int) { return Meeting::kBlock; }
};
template <typename Program>
struct Meetings<Program, std::void_t<decltype(Program::meets(0))>> {
  static constexpr Meeting after(int phase) { return Program::meets(phase); }
};

template <typename Program, typename = void>
struct FirstPhases : std::integral_constant<int, 0> {};
template <typename Program>
struct FirstPhases<Program, std::void_t<decltype(Program::kFirstPhases)>>
    : std::integral_constant<int, Program::kFirstPhases> {};

struct NoState {};

// For programs that reduce nothing.
struct NoTeams {
  static constexpr bool reduces(int) { return false; }
};

template <typename Program>
constexpr bool reduces_anything() {
  for (int phase = 0; phase < Program::kPhases; ++phase) {
    if (Program::reduces(phase)) return true;
  }
  return false;
}

// What reduce_team has of shared memory: a partial result a thread.
template <typename Program>
constexpr size_t static_shared_bytes() {
  if constexpr (reduces_anything<Program>() && MostTeam<Program>::value > 32) {
    return Program::kThreads * sizeof(Program::State::partial);
  }
  return 0;
}

template <int kPhase, typename Program>
void run_phase_on_host(const Program& program, int64_t block, int step, std::vector<typename Program::State>& states,
                       void* shared) {
  for (int thread = 0; thread < Program::kThreads; ++thread) {
    program.template run<kPhase>(Place{block, thread}, step, states[thread], shared);
  }
  if constexpr (Program::reduces(kPhase)) {
    const int team = program.team, apart = program.apart;
    for (int first = 0; first < Program::kThreads; first += team) {
      std::vector<std::decay_t<decltype(states[0].partial)>> mine(team), next(team);
      for (int i = 0; i < team; ++i) mine[i] = states[first + i].partial;
      for (int offset = apart; offset < team && offset < 32; offset *= 2) {
        for (int i = 0; i < team; ++i) next[i] = Program::combine(mine[i & ~offset], mine[i | offset]);
        std::swap(mine, next);
      }
      for (int i = 0; i < team; ++i) {
        auto all = mine[i % apart];
        for (int warp = 32; warp < team; warp += 32) all = Program::combine(all, mine[warp + i % apart]);
        states[first + i].partial = all;
      }
    }
  }
}

template <int kFirst, typename Program, int... kPhases>
void run_phases_on_host([[maybe_unused]] const Program& program, [[maybe_unused]] int64_t block,
                        [[maybe_unused]] int step, [[maybe_unused]] std::vector<typename Program::State>& states,
                        [[maybe_unused]] void* shared, std::integer_sequence<int, kPhases...>) {
  (run_phase_on_host<kFirst + kPhases>(program, block, step, states, shared), ...);
}

// The blocks one after the other, on the CPU.
template <typename Program>
void run_on_host(const Program& program, size_t most_shared = kMostSharedBytes) {
  struct alignas(16) Line {
    std::byte bytes[16];
  };
  static_assert(static_shared_bytes<Program>() <= kStaticSharedBytes, "no plan expects that much");
  const int64_t blocks = program.num_blocks();
  const size_t bytes = program.shared_bytes();
  const size_t most = needs_leave(bytes) ? most_shared : kSharedWithoutLeave - static_shared_bytes<Program>();
  if (bytes > most) {
    throw Error("a block asks for " + std::to_string(bytes) + " bytes of shared memory and may have " +
                std::to_string(most));
  }
  std::vector<typename Program::State> states(Program::kThreads);
  for (int64_t block = 0; block < blocks; ++block) {
    // Of exactly the size that a launch asks for, and never zero, so that sanitizers and tests see a slip.
    std::vector<Line> shared((program.shared_bytes() + 15) / 16);
    if (!shared.empty()) std::memset(static_cast<void*>(shared.data()), 0xff, shared.size() * sizeof(Line));
    states.assign(Program::kThreads, typename Program::State{});
    constexpr int kFirst = FirstPhases<Program>::value, kLast = kFirst + Program::kStepPhases;
    run_phases_on_host<0>(program, block, 0, states, shared.data(), std::make_integer_sequence<int, kFirst>());
    const int steps = program.num_steps(block);
    for (int step = 0; step < steps; ++step) {
      run_phases_on_host<kFirst>(program, block, step, states, shared.data(),
                                 std::make_integer_sequence<int, Program::kStepPhases>());
    }
    run_phases_on_host<kLast>(program, block, 0, states, shared.data(),
                              std::make_integer_sequence<int, Program::kPhases - kLast>());
  }
}

}  // namespace torchtp::kernels
