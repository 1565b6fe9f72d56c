#pragma once

#include <stdexcept>
#include <string>

namespace torchtp {

// What the torch-free floors throw; the floors above turn it into the error type PyTorch users expect.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what) : std::runtime_error(what) {}
};

}  // namespace torchtp
