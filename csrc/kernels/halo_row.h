#pragma once

#include <cstdint>

#include "kernels/halo_planes.h"

namespace torchtp::kernels {

// Where one row lies, in whatever pieces: `apart` elements from column to column, `plane` as HaloPlanes has it.
template <typename T>
struct HaloRow {
  const T* middle = nullptr;  // column 0
  const T* left = nullptr;    // the first halo column, on either side
  const T* right = nullptr;
  int32_t apart;

  TORCHTP_HOST_DEVICE HaloRow(const HaloPlanes<T>& in, int64_t plane, int32_t y, int32_t apart) : apart(apart) {
    const int32_t row = y + in.rows_above, rows = in.rows_above + in.height + in.rows_below;
    if (row < 0 || row >= rows) return;
    const int64_t across = int64_t{apart} * in.width;
    if (y < 0) {
      middle = in.above + (plane * in.rows_above + row) * across;
    } else if (y >= in.height) {
      middle = in.below + (plane * in.rows_below + y - in.height) * across;
    } else {
      middle = in.own + (plane * in.height + y) * across;
    }
    if (in.columns_left > 0) left = in.left + (plane * rows + row) * in.columns_left * apart;
    if (in.columns_right > 0) right = in.right + (plane * rows + row) * in.columns_right * apart;
  }
  // Null beyond all pieces.
  TORCHTP_HOST_DEVICE const T* at(const HaloPlanes<T>& in, int32_t x) const {
    const T* piece = middle;
    int32_t column = x, columns = in.width;
    if (x < 0) {
      piece = left;
      column = x + in.columns_left;
      columns = in.columns_left;
    } else if (x >= in.width) {
      piece = right;
      column = x - in.width;
      columns = in.columns_right;
    }
    return piece && column >= 0 && column < columns ? piece + int64_t{column} * apart : nullptr;
  }
};

}  // namespace torchtp::kernels
