#include <complex>
#include <cstdint>
#include <numeric>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "kernels/halo_pack.h"

using torchtp::kernels::halo_pack_cpu;
using torchtp::kernels::halo_unpack_cpu;
using torchtp::kernels::HaloSlabs;

namespace {

// The meaning, as loops over the coordinates.
template <typename T>
std::vector<T> reference(const std::vector<T>& tensor, const HaloSlabs& slabs) {
  std::vector<T> packed;
  for (int side = 0; side < 2; ++side)
    for (int64_t o = 0; o < slabs.outer; ++o)
      for (int64_t row = slabs.start[side]; row < slabs.start[side] + slabs.depth[side]; ++row)
        for (int64_t i = 0; i < slabs.inner; ++i) packed.push_back(tensor[(o * slabs.extent + row) * slabs.inner + i]);
  return packed;
}

template <typename T>
std::vector<T> numbered(int64_t count) {
  std::vector<T> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<T>(i + 1);
  return values;
}

template <typename T>
void check_round_trip(const HaloSlabs& slabs) {
  const auto tensor = numbered<T>(slabs.outer * slabs.extent * slabs.inner);
  const auto expected = reference(tensor, slabs);
  std::vector<T> packed(slabs.packed_elements());
  halo_pack_cpu(tensor.data(), packed.data(), slabs, sizeof(T));
  CHECK(packed == expected);

  std::vector<T> back(tensor.size(), T{});
  halo_unpack_cpu(packed.data(), back.data(), slabs, sizeof(T));
  CHECK(reference(back, slabs) == expected);
  size_t written = 0;
  for (const T& value : back) written += value == T{} ? 0 : 1;
  CHECK_EQUAL(written, expected.size());
}

void every_geometry() {
  for (int64_t outer : {1, 3})
    for (int64_t inner : {1, 5})
      for (int64_t extent : {1, 2, 7})
        for (int64_t left = 0; left <= extent; ++left)
          for (int64_t right = 0; left + right <= extent; ++right) {
            const HaloSlabs slabs{outer, extent, inner, {0, extent - right}, {left, right}};
            check_round_trip<uint8_t>(slabs);
            check_round_trip<int16_t>(slabs);
            check_round_trip<float>(slabs);
            check_round_trip<double>(slabs);
            check_round_trip<std::complex<double>>(slabs);
          }
}

void odd_element_is_refused() {
  const HaloSlabs slabs{1, 1, 1, {0, 0}, {0, 0}};
  CHECK_THROWS(halo_pack_cpu(nullptr, nullptr, slabs, 3), "not 3");
  CHECK_THROWS(halo_unpack_cpu(nullptr, nullptr, slabs, 32), "not 32");
}

}  // namespace

int main() {
  return torchtp::test::run({{"every geometry", every_geometry}, {"odd element is refused", odd_element_is_refused}});
}
