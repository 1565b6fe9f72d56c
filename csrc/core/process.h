#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace torchtp {

// A process as the kernel shows it to others of the same pid namespace.
struct Process {
  char state;           // R running, S sleeping, D waiting for a device, T stopped, t traced, Z or X gone
  int stop_signal;      // that stopped it, 0 where the kernel does not tell
  uint64_t started_at;  // ticks since the machine started: tells it from a later process of the same pid

  bool is_gone() const { return state == 'Z' || state == 'X' || state == 'x'; }
};

// Whether the caller is the thread that its process began with.
bool on_main_thread();

// Nothing when there is no such process, or none that this one can see.
std::optional<Process> look_at(pid_t pid);

}  // namespace torchtp
