#include "core/error.h"
#include "kernels/halo_pack.h"

namespace torchtp::kernels {
namespace {

template <typename F>
void for_each(int64_t total, const F& f) {
  for (int64_t i = 0; i < total; ++i) f(i);
}

void require_element_bytes(bool known, size_t element_bytes) {
  if (!known) throw Error("halo_pack: an element has 1, 2, 4, 8 or 16 bytes, not " + std::to_string(element_bytes));
}

}  // namespace

void halo_pack_cpu(const void* tensor, void* packed, const HaloSlabs& slabs, size_t element_bytes) {
  const bool known = dispatch_element_bytes(element_bytes, [&](auto element) {
    using T = decltype(element);
    for_each(slabs.packed_elements(), HaloPack<T>{static_cast<const T*>(tensor), static_cast<T*>(packed), slabs});
  });
  require_element_bytes(known, element_bytes);
}

void halo_unpack_cpu(const void* packed, void* tensor, const HaloSlabs& slabs, size_t element_bytes) {
  const bool known = dispatch_element_bytes(element_bytes, [&](auto element) {
    using T = decltype(element);
    for_each(slabs.packed_elements(), HaloUnpack<T>{static_cast<const T*>(packed), static_cast<T*>(tensor), slabs});
  });
  require_element_bytes(known, element_bytes);
}

}  // namespace torchtp::kernels
