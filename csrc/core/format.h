#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>

#include "core/error.h"

namespace torchtp {

// The parts as one string: cat("rank ", 3).
template <typename... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// 6553600 as "6,553,600".
inline std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (size_t end = text.size(); end > (text[0] == '-' ? 4 : 3);) text.insert(end -= 3, ",");
  return text;
}

// "250 ms", "9.8 s", "10 s", "300 s".
inline std::string in_words(std::chrono::nanoseconds time) {
  const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
  if (ms < 1000) return cat(ms, " ms");
  if (ms >= 9950 || ms % 1000 < 50) return cat((ms + 500) / 1000, " s");
  return cat((ms + 50) / 1000, ".", (ms + 50) / 100 % 10, " s");
}

// The text as an aside, " (text)"; nothing for nothing.
inline std::string in_brackets(const std::string& text) { return text.empty() ? "" : cat(" (", text, ")"); }

// Throws what the last failed system call says, e.g. throw_errno("memfd_create").
template <typename... Parts>
[[noreturn]] void throw_errno(const Parts&... parts) {
  const int code = errno;
  throw Error(cat(parts..., ": ", std::strerror(code)));
}

}  // namespace torchtp
