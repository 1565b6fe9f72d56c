#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// The little a C++ test needs: cases that run one after the other, and checks that say what was expected and found.
namespace torchtp::test {

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
void check_equal(const A& found, const B& expected, const char* text, const char* file, int line) {
  if (found == expected) return;
  std::ostringstream message;
  message << text << " is " << found << ", expected " << expected;
  fail(file, line, message.str());
}

template <typename F>
void check_throws(F&& f, const std::string& part, const char* file, int line) {
  try {
    f();
  } catch (const std::exception& error) {
    if (std::string(error.what()).find(part) != std::string::npos) return;
    fail(file, line, "expected an error with '" + part + "', got: " + error.what());
  }
  fail(file, line, "expected an error with '" + part + "', none was thrown");
}

using Case = std::pair<std::string, std::function<void()>>;

// Runs every case, prints those that failed; the exit status of the program.
inline int run(const std::vector<Case>& cases) {
  int failed = 0;
  for (const auto& [name, body] : cases) {
    try {
      body();
    } catch (const std::exception& error) {
      ++failed;
      std::fprintf(stderr, "FAILED %s\n  %s\n", name.c_str(), error.what());
    }
  }
  std::printf("%zu cases, %d failed\n", cases.size(), failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace torchtp::test

#define CHECK(condition) \
  if (!(condition)) torchtp::test::fail(__FILE__, __LINE__, #condition " is false")
#define CHECK_EQUAL(found, expected) torchtp::test::check_equal(found, expected, #found, __FILE__, __LINE__)
#define CHECK_THROWS(statement, part) torchtp::test::check_throws([&] { statement; }, part, __FILE__, __LINE__)
