#include "core/random.h"

#include <sys/random.h>

#include <vector>

#include "core/format.h"

namespace torchtp {

std::string random_hex(size_t num_bytes) {
  std::vector<unsigned char> bytes(num_bytes);
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) throw_errno("getrandom");
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace torchtp
