#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/error.h"

namespace torchtp::backend {

// The store raised, or did not answer in time.
class StoreError : public Error {
 public:
  using Error::Error;
};

// A c10d store whose answers are waited for only so long. TCPStore itself waits for ever for a server that was stopped,
// or that nothing reaches any more. Every call may throw StoreError.
class PatientStore {
 public:
  PatientStore(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout);
  ~PatientStore();
  PatientStore(const PatientStore&) = delete;
  PatientStore& operator=(const PatientStore&) = delete;

  int64_t add(const std::string& key, int64_t value);
  void set(const std::string& key, const std::string& value);
  std::string get(const std::string& key);  // of a key that is there
  std::vector<std::string> get_all(const std::vector<std::string>& keys);
  bool has(const std::string& key) { return has_all({key}); }
  bool has_all(const std::vector<std::string>& keys);

 private:
  using Step = std::function<void(c10d::Store&)>;

  // Shared with the thread: where a call got no answer, that is left to itself.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    c10::intrusive_ptr<c10d::Store> store;
    Step step;  // empty when it is done
    std::string error;
    bool stopping = false;
  };

  static void work(const std::shared_ptr<State>& state);
  static void take_step(State& state, std::unique_lock<std::mutex>& lock);  // without the lock
  void ask(Step step);

  const std::shared_ptr<State> state_;
  const std::chrono::milliseconds timeout_;
  std::thread thread_;
};

}  // namespace torchtp::backend
