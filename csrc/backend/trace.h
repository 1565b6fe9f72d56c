#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/record.h"
#include "backend/signal_watch.h"
#include "shm/whereabouts.h"

namespace torchtp::backend {

// The recorders of this process's groups, and where they are written when something goes wrong: JSON lines, a file a
// rank. One object a process; whoever makes groups hands it to them.
class Trace {
 public:
  Trace() = default;
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  void add(const std::weak_ptr<Recorder>& recorder);
  // Where this process waits, of all its groups. A forked child has its own: it must not write on the boards of its
  // parent's groups, which it may have unmapped.
  std::shared_ptr<shm::Whereabouts> whereabouts();
  std::vector<std::shared_ptr<Recorder>> recorders() const;

  // From now on the first error of a group, and each of these signals, writes PATH.rank<global rank>.jsonl. After the
  // signal's dump what was there before us for it happens: the program's own handler, or its end.
  void write_to(const std::string& path, const std::vector<int>& signals);
  std::string path() const;

  // Writes all calls now; returns the file's name. With an empty path to where write_to() says, or nowhere. A failure
  // to write is told on stderr: it must not hide what is being dumped for.
  std::string dump(const std::string& reason, const std::string& path = "") const noexcept;

 private:
  mutable std::mutex mutex_;  // of the members below
  std::shared_ptr<shm::Whereabouts> whereabouts_;
  pid_t process_ = 0;  // whose that is
  std::vector<std::weak_ptr<Recorder>> recorders_;
  std::string path_;
  std::unique_ptr<SignalWatch> watch_;
};

}  // namespace torchtp::backend
