#pragma once

#include <cstdint>

#include "core/host_device.h"

// How the outputs of a thread and the rows of its window meet along one dim, known to the compiler: which tap lies
// between them. A thread keeps its filter by *slots*, kSlots a dim; window rows count from first_row().
namespace torchtp::kernels {

// A convolution: output `o` reads the inputs kStride * o + tap - offset.
template <int kKernel, int kStride>
struct ForwardMeeting {
  static constexpr int kSlots = kKernel;

  // Rows of the window of `outputs` neighbours; where in the window those of output number `outputs` begin.
  static TORCHTP_HOST_DEVICE constexpr int32_t rows(int32_t outputs) { return (outputs - 1) * kStride + kKernel; }
  static TORCHTP_HOST_DEVICE constexpr int32_t skipped(int32_t outputs) { return outputs * kStride; }
  // Between output and window row; none if negative.
  static TORCHTP_HOST_DEVICE constexpr int slot(int output, int row) {
    return row - output * kStride < kKernel ? row - output * kStride : -1;
  }
  static TORCHTP_HOST_DEVICE int32_t first_row(int32_t output, int32_t offset) { return output * kStride - offset; }
  static TORCHTP_HOST_DEVICE int32_t tap(int32_t slot, int32_t, int32_t) { return slot; }
};

// The gradient of its input: input `i` was read by the outputs (i + offset - tap) / kStride, where that is a whole
// number. So neighbours have taps of their own, every kStride-th one, and which ones they are depends on `offset`: the
// compiler only knows that inputs kStride apart have the same. For input number `i` of a thread slots
// [i % kStride * kEach, + kEach) hold those that it may have, with zeros for the one that it has not.
template <int kKernel, int kStride>
struct GradMeeting {
  static constexpr int kEach = (kKernel + kStride - 2) / kStride + 1, kSlots = kStride * kEach;

  // Numbers of inputs are multiples of kStride.
  static TORCHTP_HOST_DEVICE constexpr int32_t rows(int32_t inputs) { return inputs / kStride + kEach; }
  static TORCHTP_HOST_DEVICE constexpr int32_t skipped(int32_t inputs) { return inputs / kStride; }
  static TORCHTP_HOST_DEVICE constexpr int slot(int input, int row) {
    const int back = (input + kStride - 1) / kStride + kEach - 1 - row;
    return back >= 0 && back < kEach ? input % kStride * kEach + back : -1;
  }
  static TORCHTP_HOST_DEVICE int32_t first_row(int32_t input, int32_t offset) {
    return (input + offset - phase(input, offset)) / kStride - (kEach - 1);
  }
  // Where a thread's first input is `input`; may lie outside the filter.
  static TORCHTP_HOST_DEVICE int32_t tap(int32_t slot, int32_t input, int32_t offset) {
    return phase(input, offset) - (kStride - slot / kEach) % kStride + kStride * (slot % kEach);
  }

 private:
  static TORCHTP_HOST_DEVICE int32_t phase(int32_t input, int32_t offset) {
    const int32_t rest = (input + offset) % kStride;
    return rest < 0 ? rest + kStride : rest;
  }
};

}  // namespace torchtp::kernels
