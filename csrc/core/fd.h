#pragma once

#include <unistd.h>

#include <utility>

namespace torchtp {

// A file descriptor, closed with its owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int value) : value_(value) {}
  ~Fd() {
    if (value_ >= 0) ::close(value_);
  }
  Fd(Fd&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }

  static Fd memory(const char* name);  // an anonymous file that can be sealed
  static Fd unix_socket();             // of messages, not yet bound or connected
  static Fd tcp_socket(int family);    // likewise; never blocks
  static Fd event();                   // a counter to wake a thread by; never blocks
  static Fd epoll();
  // May hold nothing when the caller has hung up meanwhile. `flags`: SOCK_NONBLOCK.
  static Fd accept(const Fd& listener, int flags = 0);

  int get() const { return value_; }
  explicit operator bool() const { return value_ >= 0; }

 private:
  int value_ = -1;
};

}  // namespace torchtp
