#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "explorer.h"

namespace torchtp::test {

// The world of csrc/shm/protocol.h in which ranks are an Explorer's.
struct Model {
  static constexpr int kAnybody = -1, kNobody = -2;

  template <typename T>
  class Atomic {
   public:
    T load(std::memory_order order = std::memory_order_seq_cst) const {
      if (writer_ != kNobody && !Explorer::current().owns(writer_))
        Explorer::current().access(order == std::memory_order_relaxed);
      Explorer::current().learned(static_cast<uint64_t>(value_));
      return value_;
    }
    void store(T value, std::memory_order order = std::memory_order_seq_cst) {
      Explorer::current().access(order == std::memory_order_relaxed);
      set(value);
    }
    T exchange(T value) {
      return update([&](T) { return value; });
    }
    T fetch_add(T by) {
      return update([&](T old) { return old + by; });
    }
    T fetch_sub(T by) {
      return update([&](T old) { return old - by; });
    }
    bool compare_exchange_strong(T& expected, T value) {
      const T old = update([&](T now) { return now == expected ? value : now; });
      const bool same = old == expected;
      expected = old;
      return same;
    }
    T peek() const { return value_; }
    // Who alone will write to it: it does not matter when that rank reads it.
    void set_writer(int rank) { writer_ = rank; }
    // Its value is no part of the state: more_state() says what matters of it. Nobody uses what an update returns.
    void set_counter() { is_counter_ = true; }

   private:
    template <typename F>
    T update(F&& f) {
      Explorer::current().access(false);
      const T old = value_;
      if (!is_counter_) Explorer::current().learned(static_cast<uint64_t>(old));
      set(static_cast<T>(f(old)));
      return old;
    }
    void set(T value) {
      if (writer_ != kAnybody && !Explorer::current().owns(writer_)) {
        Explorer::current().note_failure("a word is written by a rank that was not to write to it");
      }
      Explorer::current().changed(this, static_cast<uint64_t>(value_),
                                  static_cast<uint64_t>(is_counter_ ? value_ : value));
      value_ = value;
    }

    T value_{};
    int writer_ = kAnybody;
    bool is_counter_ = false;
  };

  static void wake(Atomic<uint32_t>& word) noexcept {
    Explorer::current().point();
    Explorer::current().wake(&word);
  }
  static void sleep(Atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds) {
    Explorer::current().point();
    if (word.peek() == value) Explorer::current().sleep(&word);
  }
};

}  // namespace torchtp::test
