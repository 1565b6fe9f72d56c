#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace torchtp::kernels {

// Extents of an activation of this rank and of what its neighbours sent. Rows and columns count from the first own one.
struct HaloExtents {
  int32_t channels, height, width;
  int32_t rows_above = 0, rows_below = 0, columns_left = 0, columns_right = 0;

  TORCHTP_HOST_DEVICE int32_t first_row() const { return -rows_above; }
  TORCHTP_HOST_DEVICE int32_t end_row() const { return height + rows_below; }
  TORCHTP_HOST_DEVICE int32_t first_column() const { return -columns_left; }
  TORCHTP_HOST_DEVICE int32_t end_column() const { return width + columns_right; }
  TORCHTP_HOST_DEVICE bool has_halo() const { return rows_above + rows_below + columns_left + columns_right > 0; }
};

// Each piece where it lies: own [N, C, height, width]; halo rows above and below it, as wide as it is; halo columns
// left and right of all those rows, so that the corners are in them. Every piece is dense in the same layout; one
// without rows or columns may be null. Beyond all pieces there are zeros.
template <typename T>
struct HaloPlanes : HaloExtents {
  const T* own = nullptr;
  const T* above = nullptr;
  const T* below = nullptr;
  const T* left = nullptr;
  const T* right = nullptr;

  // `plane` is n * channels + c (and c unused) where channels come first, n where they come last; so in `at`.
  template <bool kChannelsLast>
  TORCHTP_HOST_DEVICE int64_t own_index(int64_t plane, int32_t c, int32_t y, int32_t x) const {
    const int64_t pixel = (plane * height + y) * width + x;
    return kChannelsLast ? pixel * channels + c : pixel;
  }

  // Channels first: where columns [0, width) of a row lie, own or above or below; null beyond these.
  TORCHTP_HOST_DEVICE const T* line(int64_t plane, int32_t y) const {
    const T* piece = own;
    int32_t rows = height;
    if (y < 0) {
      piece = above;
      rows = rows_above;
      y += rows_above;
    } else if (y >= height) {
      piece = below;
      rows = rows_below;
      y -= height;
    }
    if (y < 0 || y >= rows) return nullptr;
    return piece + (plane * rows + y) * width;
  }

  // Channels last: where a pixel's channels lie; null beyond all pieces. kHalos: there may be any but own ones.
  template <bool kHalos>
  TORCHTP_HOST_DEVICE const T* pixel(int64_t n, int32_t y, int32_t x) const {
    const T* piece = own;
    int32_t rows = height, columns = width;
    if (kHalos && (x < 0 || x >= width)) {
      rows = rows_above + height + rows_below;
      y += rows_above;
      piece = x < 0 ? left : right;
      columns = x < 0 ? columns_left : columns_right;
      x += x < 0 ? columns_left : -width;
    } else if (kHalos && y < 0) {
      piece = above;
      rows = rows_above;
      y += rows_above;
    } else if (kHalos && y >= height) {
      piece = below;
      rows = rows_below;
      y -= height;
    }
    if (y < 0 || y >= rows || x < 0 || x >= columns) return nullptr;
    return piece + ((n * rows + y) * columns + x) * channels;
  }

  template <bool kChannelsLast>
  TORCHTP_HOST_DEVICE float at(int64_t plane, int32_t c, int32_t y, int32_t x) const {
    const T* piece = own;
    int32_t rows = height, columns = width;
    if (x >= 0 && x < width) {
      if (y < 0) {
        piece = above;
        rows = rows_above;
        y += rows_above;
      } else if (y >= height) {
        piece = below;
        rows = rows_below;
        y -= height;
      }
    } else {
      rows = rows_above + height + rows_below;
      y += rows_above;
      piece = x < 0 ? left : right;
      columns = x < 0 ? columns_left : columns_right;
      x += x < 0 ? columns_left : -width;
    }
    if (y < 0 || y >= rows || x < 0 || x >= columns) return 0;
    const int64_t pixel = (plane * rows + y) * columns + x;
    return static_cast<float>(piece[kChannelsLast ? pixel * channels + c : pixel]);
  }
};

// Rows [y0, y1) of columns [x0, x1).
struct Region {
  int32_t y0, y1, x0, x1;

  TORCHTP_HOST_DEVICE int32_t height() const { return y1 > y0 ? y1 - y0 : 0; }
  TORCHTP_HOST_DEVICE int32_t width() const { return x1 > x0 ? x1 - x0 : 0; }
  TORCHTP_HOST_DEVICE int64_t area() const { return int64_t{height()} * width(); }
};

// What a launch computes of a plane. Two members, not an array: a kernel that indexes an array of its parameters copies
// it to memory.
struct Regions {
  Region first, second;
  int64_t area() const { return first.area() + second.area(); }
};

}  // namespace torchtp::kernels
