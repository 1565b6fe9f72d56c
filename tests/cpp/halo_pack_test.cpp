// What the kernels of an exchange move, against loops over the coordinates: packing, laying, adding, parts of payloads,
// payloads of several pieces and of another layout.

#include "kernels/halo_pack.h"

#include <complex>
#include <cstdint>
#include <numeric>
#include <vector>

#include "check.h"

using namespace torchtp::kernels;

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
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<T>(i % 100 + 1);
  return values;
}

template <typename T>
void check_round_trip(const HaloSlabs& slabs) {
  const auto tensor = numbered<T>(slabs.outer * slabs.extent * slabs.inner);
  const auto expected = reference(tensor, slabs);
  std::vector<T> packed(slabs.packed_elements());
  halo_pack_cpu(packing(tensor.data(), packed.data(), slabs, sizeof(T)));
  CHECK(packed == expected);

  std::vector<T> back(tensor.size(), T{});
  halo_take_cpu(unpacking(packed.data(), back.data(), slabs, sizeof(T)));
  CHECK(reference(back, slabs) == expected);
  size_t written = 0;
  for (const T& value : back) written += value == T{} ? 0 : 1;
  CHECK_EQUAL(written, expected.size());
}

void every_geometry() {
  for (int64_t outer : {1, 3})
    for (int64_t inner : {1, 5, 16})
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

void many_blocks() { check_round_trip<float>({300, 70, 33, {0, 60}, {30, 10}}); }

void division_is_exact() {
  for (uint32_t by : {1u, 2u, 3u, 7u, 64u, 641u, 65537u, 1000003u, (1u << 30) + 1, (1u << 31) - 1}) {
    const Divider divider(by);
    for (uint32_t n : {0u, 1u, by - 1, by, by + 1, 2 * by - 1, 12345678u, (1u << 31) - 1}) {
      if (n < 1u << 31) CHECK_EQUAL(divider.quotient(n), n / by);
    }
  }
}

// Columns of three tensors that are stacked, as [planes, rows, columns]: the payload is that of their stack, and
// arrives in any parts.
void payloads_of_several_pieces() {
  const int64_t planes = 3, width = 5, columns = 2, first = 1;
  const std::vector<int64_t> heights{2, 4, 1};
  std::vector<std::vector<int32_t>> pieces;
  int32_t next = 1;
  for (int64_t height : heights) {
    pieces.emplace_back(planes * height * width);
    for (int32_t& value : pieces.back()) value = next++;
  }
  std::vector<int32_t> expected;
  for (int64_t plane = 0; plane < planes; ++plane)
    for (size_t piece = 0; piece < pieces.size(); ++piece)
      for (int64_t row = 0; row < heights[piece]; ++row)
        for (int64_t column = 0; column < columns; ++column)
          expected.push_back(pieces[piece][(plane * heights[piece] + row) * width + first + column]);
  const int64_t total = static_cast<int64_t>(expected.size()) * 4, stride = total / planes;
  for (const int64_t part : {total, int64_t{64}, int64_t{128}}) {
    std::vector<int32_t> payload(expected.size(), -1);
    for (int64_t begin = 0; begin < total; begin += part) {
      HaloPack pack;
      int64_t above = 0;
      for (size_t piece = 0; piece < pieces.size(); ++piece) {
        HaloSlab slab;
        slab.data = reinterpret_cast<std::byte*>(pieces[piece].data() + first);
        slab.outer = planes;
        slab.rows = heights[piece];
        slab.run_bytes = columns * 4;
        slab.row_stride = width * 4;
        slab.outer_stride = heights[piece] * width * 4;
        slab.payload_begin = above;
        slab.payload_stride = stride;
        above += slab.outer_bytes();
        pack.moves.add(
            HaloMove::make(slab, reinterpret_cast<std::byte*>(payload.data()), begin, std::min(part, total - begin)));
      }
      halo_pack_cpu(pack);
    }
    CHECK(payload == expected);
  }
}

// Rows of a tensor of [batches, channels, height, width] in either layout, from a payload in the other one.
template <typename T>
void check_other_layout(bool channels_last, bool adds) {
  const int64_t batches = 2, channels = 3, height = 5, width = 4, first = 1, rows = 3;
  const auto at = [&](int64_t n, int64_t c, int64_t y, int64_t x, int64_t extent, bool last) {
    return last ? ((n * extent + y) * width + x) * channels + c : ((n * channels + c) * extent + y) * width + x;
  };
  const auto payload = numbered<T>(batches * channels * rows * width);
  std::vector<T> tensor(batches * channels * height * width, T(1)), expected = tensor;
  for (int64_t n = 0; n < batches; ++n)
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t y = 0; y < rows; ++y)
        for (int64_t x = 0; x < width; ++x) {
          T& to = expected[at(n, c, first + y, x, height, channels_last)];
          const T& from = payload[at(n, c, y, x, rows, !channels_last)];
          to = adds ? static_cast<T>(to + from) : from;
        }
  const int64_t row = width * (channels_last ? channels : 1), outer = batches * (channels_last ? 1 : channels);
  HaloSlab slab;
  slab.data = reinterpret_cast<std::byte*>(tensor.data() + first * row);
  slab.outer = 1;
  slab.rows = outer;
  slab.run_bytes = rows * row * static_cast<int64_t>(sizeof(T));
  slab.row_stride = height * row * static_cast<int64_t>(sizeof(T));
  HaloHeader header;
  header.layout = channels_last ? 0 : 1;
  const auto total = static_cast<int64_t>(payload.size() * sizeof(T));
  for (int64_t begin = 0; begin < total; begin += 64) {
    HaloTakeParams params;
    auto move = HaloMove::make(slab, reinterpret_cast<std::byte*>(const_cast<T*>(payload.data())), begin,
                               std::min<int64_t>(64, total - begin), adds ? HaloMerge::kFloat : HaloMerge::kCopy);
    move.header = &header;
    move.layout.layout = channels_last ? 1 : 0;
    move.layout.channels_last = channels_last;
    move.layout.element_bytes = sizeof(T);
    move.layout.channels = channels;
    move.layout.positions = rows * width;
    params.moves.add(move);
    halo_take_cpu(params);
  }
  CHECK(tensor == expected);
}

void payloads_of_another_layout() {
  for (const bool channels_last : {false, true}) {
    check_other_layout<float>(channels_last, false);
    check_other_layout<int16_t>(channels_last, false);
    check_other_layout<std::complex<double>>(channels_last, false);
    check_other_layout<float>(channels_last, true);
    check_other_layout<std::complex<float>>(channels_last, true);
  }
}

template <typename T>
void check_sums(HaloMerge merge, int64_t inner) {
  const HaloSlabs slabs{3, 6, inner, {1, 0}, {4, 0}};
  auto tensor = numbered<T>(3 * 6 * inner);
  const auto payload = numbered<T>(slabs.packed_elements());
  auto expected = tensor;
  size_t i = 0;
  for (int64_t o = 0; o < 3; ++o)
    for (int64_t place = inner; place < 5 * inner; ++place) {
      T& to = expected[o * 6 * inner + place];
      to = sum_of(to, payload[i++]);
    }
  HaloSlab slab;
  slab.data = reinterpret_cast<std::byte*>(tensor.data() + inner);
  slab.outer = 1;
  slab.rows = 3;
  slab.run_bytes = 4 * inner * static_cast<int64_t>(sizeof(T));
  slab.row_stride = 6 * inner * static_cast<int64_t>(sizeof(T));
  HaloTakeParams params;
  params.moves.add(
      HaloMove::make(slab, reinterpret_cast<std::byte*>(const_cast<T*>(payload.data())), 0, slab.num_bytes(), merge));
  halo_take_cpu(params);
  CHECK(std::equal(tensor.begin(), tensor.end(), expected.begin(),
                   [](const T& a, const T& b) { return static_cast<float>(a) == static_cast<float>(b); }));
}

void sums_in_every_type() {
  for (const int64_t inner : {1, 3, 8}) {
    check_sums<uint8_t>(HaloMerge::kInt8, inner);
    check_sums<int16_t>(HaloMerge::kInt16, inner);
    check_sums<int32_t>(HaloMerge::kInt32, inner);
    check_sums<int64_t>(HaloMerge::kInt64, inner);
    check_sums<c10::Half>(HaloMerge::kHalf, inner);
    check_sums<c10::BFloat16>(HaloMerge::kBFloat16, inner);
    check_sums<float>(HaloMerge::kFloat, inner);
    check_sums<double>(HaloMerge::kDouble, inner);
  }
}

void a_halo_of_too_many_elements_is_refused() {
  HaloSlab slab;
  slab.outer = 1;
  slab.rows = 1;
  slab.run_bytes = (int64_t{1} << 31) + 1;
  CHECK_THROWS(HaloMove::make(slab, nullptr, 0, slab.run_bytes), "is too large");
}

}  // namespace

int main() {
  return torchtp::test::run({{"every geometry", every_geometry},
                             {"many blocks", many_blocks},
                             {"division is exact", division_is_exact},
                             {"payloads of several pieces", payloads_of_several_pieces},
                             {"payloads of another layout", payloads_of_another_layout},
                             {"sums in every type", sums_in_every_type},
                             {"a halo of too many elements is refused", a_halo_of_too_many_elements_is_refused}});
}
