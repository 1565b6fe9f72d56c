#include "core/mapping.h"

#include <sys/mman.h>

#include "core/format.h"

namespace torchtp {

namespace {

std::byte* map(size_t num_bytes, int flags, int fd) {
  void* const data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED)
    throw_errno("cannot map ", num_bytes, " bytes of address space (set TORCHTP_HEAP_BYTES to less)");
  return static_cast<std::byte*>(data);
}

}  // namespace

Mapping::Mapping(size_t num_bytes) : data_(map(num_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1)), num_bytes_(num_bytes) {}

Mapping::Mapping(const Fd& file, size_t num_bytes)
    : data_(map(num_bytes, MAP_SHARED, file.get())), num_bytes_(num_bytes) {}

Mapping::~Mapping() { munmap(data_, num_bytes_); }

}  // namespace torchtp
