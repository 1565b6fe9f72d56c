#pragma once

#include <cerrno>
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

// Throws what the last failed system call says, e.g. throw_errno("memfd_create").
template <typename... Parts>
[[noreturn]] void throw_errno(const Parts&... parts) {
  const int code = errno;
  throw Error(cat(parts..., ": ", std::strerror(code)));
}

}  // namespace torchtp
