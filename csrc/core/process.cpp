#include "core/process.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <sstream>
#include <string>

namespace torchtp {

namespace {

// Fields of /proc/<pid>/stat, counted from the state: what stands before it may hold spaces.
constexpr int kState = 0;
constexpr int kStartTime = 19;
constexpr int kExitCode = 49;

}  // namespace

bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

std::optional<Process> look_at(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);  // of a process that ends meanwhile there is nothing to read, which is no exception here
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  Process process{};
  std::string field;
  for (int index = 0; index <= kExitCode && fields >> field; ++index) {
    if (index == kState) process.state = field[0];
    if (index == kStartTime) process.started_at = std::stoull(field);
    // Of a stopped process the signal; zero for those who may not know.
    if (index == kExitCode && process.state == 'T') process.stop_signal = std::stoi(field) & 0x7f;
  }
  return process;
}

}  // namespace torchtp
