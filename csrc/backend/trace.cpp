#include "backend/trace.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/format.h"

namespace torchtp::backend {

namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += cat('\\', c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

const char* name_of(Operation::State state) {
  static constexpr const char* kNames[] = {"queued", "running", "done", "failed"};
  return kNames[static_cast<size_t>(state)];
}

const char* name_of(Operation::Kind kind) {
  static constexpr const char* kNames[] = {"collective", "message", "halo"};
  return kNames[static_cast<size_t>(kind)];
}

void write_operation(std::ostream& out, const std::string& group, const Operation& o) {
  out << "{\"group\": " << group << ", \"kind\": \"" << name_of(o.kind) << "\", \"sequence\": " << o.sequence
      << ", \"op\": \"" << o.op << "\", \"reduce_op\": \"" << o.reduce_op << "\", \"dtype\": \""
      << c10::toString(o.dtype) << "\", \"elements\": " << o.num_elements << ", \"bytes\": " << o.num_bytes
      << ", \"root\": " << o.root << ", \"async\": " << (o.asynchronous ? "true" : "false") << ", \"state\": \""
      << name_of(o.state) << "\", \"called_ns\": " << o.called_ns << ", \"started_ns\": " << o.started_ns
      << ", \"ended_ns\": " << o.ended_ns << ", \"waited_ns\": " << o.waited_ns << ", \"last_rank\": " << o.last_rank;
  if (o.kind == Operation::Kind::kMessage) {
    out << ", \"peer\": " << o.peer << ", \"tag\": " << o.tag << ", \"number\": " << o.number;
  }
  out << "}\n";
}

void write_group(std::ostream& out, const Recorder& recorder) {
  const Recorder::Identity& identity = recorder.identity();
  const std::string group = quoted(identity.group);
  out << "{\"group\": " << group << ", \"rank\": " << identity.rank << ", \"size\": " << identity.size
      << ", \"global_ranks\": [";
  for (int rank = 0; rank < identity.size; ++rank) {
    out << (rank == 0 ? "" : ", ") << (identity.global_ranks.empty() ? rank : identity.global_ranks.at(rank));
  }
  out << "], \"error\": " << quoted(recorder.error()) << "}\n";
  for (const Operation& operation : recorder.operations()) write_operation(out, group, operation);
}

}  // namespace

Trace::~Trace() = default;

std::shared_ptr<shm::Whereabouts> Trace::whereabouts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(process_, getpid()) != getpid()) whereabouts_ = std::make_shared<shm::Whereabouts>();
  return whereabouts_;
}

void Trace::add(const std::weak_ptr<Recorder>& recorder) {
  std::lock_guard<std::mutex> lock(mutex_);
  recorders_.erase(
      std::remove_if(recorders_.begin(), recorders_.end(), [](const auto& known) { return known.expired(); }),
      recorders_.end());
  recorders_.push_back(recorder);
}

std::vector<std::shared_ptr<Recorder>> Trace::recorders() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Recorder>> living;
  for (const auto& recorder : recorders_) {
    if (auto alive = recorder.lock()) living.push_back(std::move(alive));
  }
  return living;
}

void Trace::write_to(const std::string& path, const std::vector<int>& signals) {
  std::unique_ptr<SignalWatch> before;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    before = std::move(watch_);
  }
  before.reset();  // joins a thread that may want the mutex
  auto watch = signals.empty() ? nullptr : std::make_unique<SignalWatch>(signals, [this](int signal) {
    dump(cat("signal ", signal, " (", strsignal(signal), ")"));
  });
  std::lock_guard<std::mutex> lock(mutex_);
  path_ = path;
  watch_ = std::move(watch);
}

std::string Trace::path() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return path_;
}

std::string Trace::dump(const std::string& reason, const std::string& path) const noexcept {
  try {
    const std::string place = path.empty() ? this->path() : path;
    const auto all = recorders();
    if (place.empty() || all.empty()) return "";
    const std::string file = cat(place, ".rank", all.back()->identity().global_rank(), ".jsonl");
    const std::string draft = cat(file, ".", getpid(), ".", now_ns());  // whoever reads it sees all or nothing
    {
      std::ofstream out(draft);
      out << "{\"torchtp_trace\": 1, \"global_rank\": " << all.back()->identity().global_rank()
          << ", \"pid\": " << getpid() << ", \"reason\": " << quoted(reason) << ", \"now_ns\": " << now_ns() << "}\n";
      for (const auto& recorder : all) write_group(out, *recorder);
      if (!out.flush()) {
        const int why = errno;  // of the open or write that failed: the stream does nothing after it
        std::remove(draft.c_str());
        errno = why;
        throw_errno("cannot write ", file);
      }
    }
    if (std::rename(draft.c_str(), file.c_str()) != 0) throw_errno("cannot rename ", draft, " to ", file);
    return file;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[torchtp] the trace was not written: %s\n", error.what());
    return "";
  }
}

}  // namespace torchtp::backend
