#pragma once

#include <cstdint>

#include "kernels/band_pixels.h"
#include "kernels/band_rows.h"
#include "kernels/block_program.h"
#include "kernels/divider.h"

// How warps share out a tile of planes in matrices of 16 rows x 8 columns.
namespace torchtp::kernels {

// Of a tile: 2^log_planes planes x 2^log_strips strips of 16 rows x 2^log_parts parts of `pieces` (1, 2 or 4) matrices
// side by side. A part of a strip of a plane is a *task* of a warp. Tasks are taken strip by strip and part by part, so
// that a task may leave its results where its inputs lay: those that read its inputs too came before it, or come at the
// same time. What blocks need to find their tile is counted on the host.
struct BandGrid {
  int log_planes, log_strips, log_parts;
  int32_t pieces;
  Regions regions;
  Divider across_first = {}, across_second = {}, tiles = {};
  int32_t tiles_first = 0;

  // For a tile of about 2^log_tasks tasks; log_planes negative: as many planes as that takes.
  static BandGrid make(int log_tasks, int log_planes, int most_strips, int most_parts, const Regions& regions) {
    const Region& larger = regions.first.area() >= regions.second.area() ? regions.first : regions.second;
    const int32_t begin = larger.x0 / 8 * 8, matrices = (larger.x1 - begin + 7) / 8;
    BandGrid grid{log_planes, 0, 0, matrices > 2 ? 4 : matrices > 1 ? 2 : 1, regions};
    while (grid.log_parts < most_parts && grid.pieces << grid.log_parts < matrices) ++grid.log_parts;
    while (grid.log_strips < most_strips && 16 << grid.log_strips < larger.height()) ++grid.log_strips;
    const int log_left = log_tasks - grid.log_strips - grid.log_parts;
    if (log_planes < 0) grid.log_planes = log_left > 0 ? log_left : 0;
    grid.count();
    return grid;
  }

  // Half as many strips, for less shared memory; false if there is one.
  bool shrink() {
    if (log_strips == 0) return false;
    --log_strips;
    count();
    return true;
  }

  TORCHTP_HOST_DEVICE int32_t planes() const { return 1 << log_planes; }
  TORCHTP_HOST_DEVICE int32_t rows() const { return 16 << log_strips; }
  TORCHTP_HOST_DEVICE int32_t columns() const { return 8 * pieces << log_parts; }
  TORCHTP_HOST_DEVICE int32_t plane_tasks() const { return 1 << (log_strips + log_parts); }
  TORCHTP_HOST_DEVICE int32_t tasks() const { return plane_tasks() << log_planes; }
  int32_t num_tiles() const { return tiles_first + tiles_of(regions.second); }

  // First row and column of a tile, and its region. Tiles begin in columns that are multiples of 8.
  struct Tile {
    int32_t y0, x0;
    Region region;
  };
  TORCHTP_HOST_DEVICE Tile tile(int32_t index) const {
    const bool second = index >= tiles_first;
    const Region region = second ? regions.second : regions.first;
    const int32_t here = second ? index - tiles_first : index;
    const int32_t down = second ? across_second.quotient(here) : across_first.quotient(here);
    const int32_t along = here - down * (second ? across_second.divisor : across_first.divisor);
    return {region.y0 + down * rows(), region.x0 / 8 * 8 + along * columns(), region};
  }

 private:
  int32_t across(const Region& region) const {
    return region.width() == 0 ? 0 : (region.x1 - region.x0 / 8 * 8 + columns() - 1) / columns();
  }
  int32_t tiles_of(const Region& region) const { return (region.height() + rows() - 1) / rows() * across(region); }
  void count() {
    across_first = Divider(across(regions.first));
    across_second = Divider(across(regions.second));
    tiles_first = tiles_of(regions.first);
    tiles = Divider(num_tiles());
  }
};

// How many columns before its first tap's a tile begins, so that rows can be read halves of chunks at a time, or pixels
// two at a time, where that leaves eight outputs within 16 inputs; and whether memory can be read so.
struct BandLead {
  int32_t columns;
  bool loads;

  // Tiles of the output begin in columns that are multiples of 8.
  template <bool kChannelsLast, typename T>
  static BandLead make(const HaloPlanes<T>& in, int32_t offset, int kernel) {
    const int32_t columns = -offset & (kChannelsLast ? 1 : 3);
    const bool fits = kernel + columns <= 9;
    const bool loads = kChannelsLast ? loads_eights(in) : fits && brings_halves(in);
    return {fits && (kChannelsLast || loads) ? columns : 0, loads};
  }
};

// Which of a tile's planes, strips and parts.
struct BandTask {
  int32_t plane, strip, part;

  TORCHTP_HOST_DEVICE BandTask(const BandGrid& grid, int32_t task)
      : plane(task & ((1 << grid.log_planes) - 1)),
        strip(task >> (grid.log_planes + grid.log_parts)),
        part(task >> grid.log_planes & ((1 << grid.log_parts) - 1)) {}
};

}  // namespace torchtp::kernels
