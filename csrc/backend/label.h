#pragma once

#include <string>

namespace torchtp::backend {

// While it lives, messages about the calls of this thread say what they belong to: "bucket 5: conv2.weight ...".
class CallLabel {
 public:
  explicit CallLabel(const std::string& text) : before_(current_) { current_ = &text; }
  ~CallLabel() { current_ = before_; }
  CallLabel(const CallLabel&) = delete;
  CallLabel& operator=(const CallLabel&) = delete;

  static std::string current() { return current_ ? *current_ : std::string(); }

 private:
  static inline thread_local const std::string* current_ = nullptr;
  const std::string* const before_;
};

}  // namespace torchtp::backend
