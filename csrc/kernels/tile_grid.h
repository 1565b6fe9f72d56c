#pragma once

#include <cstdint>

#include "kernels/block_program.h"
#include "kernels/divider.h"
#include "kernels/halo_planes.h"

namespace torchtp::kernels {

// With a dilation, outputs that many rows and columns apart read a part of the input that others don't: what a block
// takes are rows y and columns x apart.
struct Steps {
  int32_t y = 1, x = 1;
};

// How the threads of a block share out its outputs: each makes rows_each x columns_each of one plane; 2^log_x threads
// lie side by side, 2^log_y below each other, 2^log_planes planes. The outputs of a tile are `steps` apart.
struct TileGrid {
  int log_x, log_y, log_planes;
  int32_t rows_each, columns_each;
  Regions regions;
  Steps steps;
  // Counted on the host: tiles side by side, those of the first region, all.
  Divider across_first = {}, across_second = {}, all = {};
  int32_t tiles_first = 0, tiles_all = 0;

  TORCHTP_HOST_DEVICE int32_t rows() const { return rows_each << log_y; }
  TORCHTP_HOST_DEVICE int32_t columns() const { return columns_each << log_x; }
  TORCHTP_HOST_DEVICE int32_t planes() const { return 1 << log_planes; }
  TORCHTP_HOST_DEVICE int32_t tiles() const { return tiles_all; }
  void count() {
    const auto across = [&](const Region& region) {
      return starts(region.width(), steps.x) * covers(region.width(), steps.x, columns());
    };
    const auto tiles_of = [&](const Region& region) {
      return starts(region.height(), steps.y) * covers(region.height(), steps.y, rows()) * across(region);
    };
    across_first = Divider(across(regions.first));
    across_second = Divider(across(regions.second));
    tiles_first = tiles_of(regions.first);
    tiles_all = tiles_first + tiles_of(regions.second);
    all = Divider(tiles_all);
  }
  // The tile's outputs: y0 and x0 of the tile, y1 and x1 of the region. Neighbouring tiles begin in neighbouring rows
  // and columns, so that they share lines of the cache.
  TORCHTP_HOST_DEVICE Region tile(int32_t index) const {
    const bool second = index >= tiles_first;
    Region region = second ? regions.second : regions.first;
    const int32_t here = second ? index - tiles_first : index;
    const int32_t down = second ? across_second.quotient(here) : across_first.quotient(here);
    const int32_t along = here - down * (second ? across_second.divisor : across_first.divisor);
    region.y0 += begin(down, starts(region.height(), steps.y), steps.y, rows());
    region.x0 += begin(along, starts(region.width(), steps.x), steps.x, columns());
    return region;
  }

 private:
  static TORCHTP_HOST_DEVICE int32_t starts(int32_t extent, int32_t step) { return extent < step ? extent : step; }
  // Tiles with one start.
  static TORCHTP_HOST_DEVICE int32_t covers(int32_t extent, int32_t step, int32_t each) {
    return (extent + step * each - 1) / (step * each);
  }
  static TORCHTP_HOST_DEVICE int32_t begin(int32_t index, int32_t starts, int32_t step, int32_t each) {
    if (step == 1) return index * each;
    return index % starts + index / starts * each * step;
  }
};

// log_planes: at least; threads that the plane has no outputs for take further planes if `spreads`.
inline TileGrid tile_grid(int log_threads, int log_planes, bool spreads, int32_t rows_each, int32_t columns_each,
                          int log_x_most, const Regions& regions, Steps steps = {}) {
  const Region& larger = regions.first.area() >= regions.second.area() ? regions.first : regions.second;
  const int free_threads = log_threads - log_planes;
  const int32_t width_each = columns_each * steps.x, height_each = rows_each * steps.y;
  const int across = log2_up((larger.width() + width_each - 1) / width_each);
  const int down = log2_up((larger.height() + height_each - 1) / height_each);
  TileGrid grid{0, 0, log_planes, rows_each, columns_each, regions, steps};
  grid.log_x = across < log_x_most ? across : log_x_most;
  if (grid.log_x > free_threads) grid.log_x = free_threads;
  grid.log_y = free_threads - grid.log_x;
  if (spreads && grid.log_y > down) {
    grid.log_planes += grid.log_y - down;
    grid.log_y = down;
  }
  grid.count();
  return grid;
}

// A tile of fewer planes, or else of fewer rows or columns: threads are left over. False if there is none smaller.
inline bool shrink(TileGrid& grid, bool planes) {
  int* const logs[] = {planes ? &grid.log_planes : &grid.log_y, &grid.log_y, &grid.log_x};
  for (int* log : logs) {
    if (*log == 0) continue;
    --*log;
    grid.count();
    return true;
  }
  return false;
}

}  // namespace torchtp::kernels
