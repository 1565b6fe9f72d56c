#include "core/build_id.h"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>

namespace torchtp {

namespace {

struct Search {
  uintptr_t address;
  std::string found;
};

bool holds(const dl_phdr_info& object, uintptr_t address) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const auto& part = object.dlpi_phdr[i];
    const uintptr_t begin = object.dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_LOAD && address >= begin && address - begin < part.p_memsz) return true;
  }
  return false;
}

size_t padded(size_t num_bytes) { return (num_bytes + 3) / 4 * 4; }

std::string in_hex(const unsigned char* bytes, size_t num_bytes) {
  std::string text;
  for (size_t i = 0; i < num_bytes; ++i) {
    text += "0123456789abcdef"[bytes[i] >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

int look_into(dl_phdr_info* object, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  if (!holds(*object, search.address)) return 0;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& part = object->dlpi_phdr[i];
    if (part.p_type != PT_NOTE) continue;
    const auto* note = reinterpret_cast<const unsigned char*>(object->dlpi_addr + part.p_vaddr);
    const unsigned char* const end = note + part.p_memsz;
    while (note + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) header;
      std::memcpy(&header, note, sizeof(header));
      const unsigned char* const name = note + sizeof(header);
      const unsigned char* const value = name + padded(header.n_namesz);
      if (header.n_type == NT_GNU_BUILD_ID && header.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
        search.found = in_hex(value, header.n_descsz);
        return 1;
      }
      note = value + padded(header.n_descsz);
    }
  }
  return 1;
}

}  // namespace

std::string build_id() {
  Search search{reinterpret_cast<uintptr_t>(&look_into), {}};
  dl_iterate_phdr(look_into, &search);
  return search.found;
}

}  // namespace torchtp
