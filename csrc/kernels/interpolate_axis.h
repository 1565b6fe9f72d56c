#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "core/host_device.h"
#include "kernels/narrow.h"

// One dim of a resampling with coordinates computed where they are needed, for the device: no table of taps to copy
// there. Coordinates are global and in float, as ATen's are for these types.
namespace torchtp::kernels {

enum class Resampling : int32_t { kNearest, kNearestExact, kLinear, kCubic };

// Where an output row reads: global input rows first, first + 1, ... each clipped to those there are.
struct Taps {
  int32_t first;
  float share;  // of the way from the row before the output's place to the one behind it
};

// Not fused with what is added to it: the place must be the same on every device, or it rounds to another row.
inline TORCHTP_HOST_DEVICE float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  volatile float product = a * b;
  return product;
#endif
}

// One dim. Rows of this rank are [in_begin, in_begin + in_size) of in_extent, and [out_begin, ...) of out_extent.
struct ResampleAxis {
  int32_t in_extent = 1, in_begin = 0, in_size = 1;
  int32_t out_extent = 1, out_begin = 0, out_size = 1;
  float step = 1;  // input rows from one output row to the next
  float inverse = 1;
  bool align_corners = false;
  Resampling mode = Resampling::kNearest;

  // scale: output rows an input row, 0 where the extents say it.
  void set_step(double scale) {
    if (align_corners && (mode == Resampling::kLinear || mode == Resampling::kCubic)) {
      step = out_extent > 1 ? static_cast<float>(in_extent - 1) / static_cast<float>(out_extent - 1) : 0.0f;
    } else {
      align_corners = false;
      step =
          scale > 0 ? static_cast<float>(1.0 / scale) : static_cast<float>(in_extent) / static_cast<float>(out_extent);
    }
    inverse = step > 0 ? 1.0f / step : 0.0f;
  }

  TORCHTP_HOST_DEVICE int num_taps() const {
    return mode == Resampling::kLinear ? 2 : (mode == Resampling::kCubic ? 4 : 1);
  }
  TORCHTP_HOST_DEVICE int32_t clipped(int32_t row) const {
    return row < 0 ? 0 : (row < in_extent ? row : in_extent - 1);
  }

  // Of global output row o. Never less than those of an earlier row.
  TORCHTP_HOST_DEVICE Taps taps_of(int32_t o) const {
    const auto row = static_cast<float>(o);
    if (mode == Resampling::kNearest) return {clipped(static_cast<int32_t>(floorf(row * step))), 0.0f};
    if (mode == Resampling::kNearestExact) return {clipped(static_cast<int32_t>(floorf((row + 0.5f) * step))), 0.0f};
    float place = align_corners ? step * row : rounded_product(step, row + 0.5f) - 0.5f;
    if (mode == Resampling::kLinear) {
      if (in_extent == out_extent) return {o, 0.0f};  // as ATen: copied, whatever the scale says
      if (place < 0) place = 0;
      const int32_t first = clipped(static_cast<int32_t>(floorf(place)));
      const float share = place - static_cast<float>(first);
      return {first, share < 0 ? 0 : (share > 1 ? 1 : share)};
    }
    const float floor = floorf(place);
    return {static_cast<int32_t>(floor) - 1, place - floor};
  }

  TORCHTP_HOST_DEVICE int32_t place(const Taps& taps, int k) const { return clipped(taps.first + k); }
  TORCHTP_HOST_DEVICE float weight(const Taps& taps, int k) const {
    if (mode == Resampling::kLinear) return k == 0 ? 1.0f - taps.share : taps.share;
    return mode == Resampling::kCubic ? cubic_weight(taps.share, k) : 1.0f;
  }
  // Sum of the weights with which an output row reads input row i.
  TORCHTP_HOST_DEVICE float weight_of(const Taps& taps, int32_t i) const {
    float sum = 0;
    for (int k = 0; k < num_taps(); ++k) {
      if (place(taps, k) == i) sum += weight(taps, k);
    }
    return sum;
  }

  // Of this rank's output rows the first that may read input row i; who reads it follows within a few rows, and ends
  // with the first row whose taps begin behind it.
  TORCHTP_HOST_DEVICE int32_t first_reader(int32_t i) const {
    const int32_t before = mode == Resampling::kCubic ? 2 : (mode == Resampling::kLinear ? 1 : 0);
    if (i <= before || !(step > 0)) return out_begin;  // rows before the first one are clipped to it
    if (in_extent == out_extent && mode == Resampling::kLinear) return i > out_begin ? i : out_begin;
    const bool at_edges = mode == Resampling::kNearest || mode == Resampling::kNearestExact;
    const float shift = align_corners || mode == Resampling::kNearest ? 0.0f : 0.5f;
    const float row = (static_cast<float>(i - before) + (at_edges ? 0.0f : shift)) * inverse - shift;
    const float safe = row - 1.0f - row * 1e-6f;  // roundings of both sides
    if (!(safe > static_cast<float>(out_begin))) return out_begin;
    const int32_t end = out_begin + out_size;
    return safe < static_cast<float>(end) ? static_cast<int32_t>(safe) : end;
  }
  // The same for certain, and if nobody reads it one that reads a later row, or the end.
  TORCHTP_HOST_DEVICE int32_t first_of(int32_t i) const {
    int32_t o = first_reader(i);
    while (o < out_begin + out_size && place(taps_of(o), num_taps() - 1) < i) ++o;
    return o;
  }
  // The end of those who read row i of one tap, from the first one on.
  TORCHTP_HOST_DEVICE int32_t end_of(int32_t first, int32_t i) const {
    int32_t o = first;
    while (o < out_begin + out_size && taps_of(o).first == i) ++o;
    return o;
  }

 private:
  // Keys' kernel with A = -0.75, for tap k of a row that lies `t` behind tap 1.
  static TORCHTP_HOST_DEVICE float cubic_weight(float t, int k) {
    constexpr float kA = -0.75f;
    const bool near = k == 1 || k == 2;
    const float x = k == 0 ? t + 1 : (k == 1 ? t : (k == 2 ? 1 - t : 2 - t));
    return near ? ((kA + 2) * x - (kA + 3)) * x * x + 1 : ((kA * x - 5 * kA) * x + 8 * kA) * x - 4 * kA;
  }
};

// A dim of these global extents, which rows of it are here left open; `mode` as PyTorch calls it.
inline ResampleAxis resample_axis(const std::string& mode, int64_t in_extent, int64_t out_extent, double scale,
                                  bool align_corners) {
  ResampleAxis axis;
  axis.in_extent = narrow(in_extent);
  axis.out_extent = narrow(out_extent);
  axis.align_corners = align_corners;
  axis.mode = mode == "nearest"         ? Resampling::kNearest
              : mode == "nearest-exact" ? Resampling::kNearestExact
              : mode == "linear"        ? Resampling::kLinear
                                        : Resampling::kCubic;
  axis.set_step(scale);
  return axis;
}

}  // namespace torchtp::kernels
