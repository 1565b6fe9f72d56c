#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "core/interval.h"
#include "kernels/depthwise_plan.h"
#include "kernels/run_on_host.h"

namespace torchtp::kernels {
namespace {

// Outputs of an axis that read no halo row; `low` and `high`: there is a halo on that side.
Interval interior(const DepthwiseAxis& axis, int32_t in_extent, int32_t out_extent, bool low, bool high) {
  const int64_t first = low ? ceil_div(axis.offset, axis.stride) : 0;
  const int64_t end = high ? floor_div(in_extent - 1 + axis.offset - axis.reach(), axis.stride) + 1 : out_extent;
  return intersect({first, end}, {0, out_extent});
}

// Rows of the gradient of the input that no halo row of the output's gradient takes part in.
Interval interior_of_grad(const DepthwiseAxis& axis, int32_t in_extent, int32_t out_extent, bool low, bool high) {
  const int64_t first = low ? axis.reach() - axis.offset : 0;
  const int64_t end = high ? int64_t{axis.stride} * out_extent - axis.offset : in_extent;
  return intersect({first, end}, {0, in_extent});
}

// What programs compute at once costs as much where a part of it is asked for.
constexpr int64_t kLeastBorderRows = 16, kLeastBorderColumns = 32;

// An interior whose borders, where there are any, take all that is computed for them at once.
Interval with_whole_borders(const Interval& inside, int64_t extent, int64_t least) {
  const auto rounded = [&](int64_t border) { return ceil_div(border, least) * least; };
  return {rounded(inside.begin), inside.end < extent ? extent - rounded(extent - inside.end) : extent};
}

Region region(const Interval& rows, const Interval& columns) {
  return {static_cast<int32_t>(rows.begin), static_cast<int32_t>(rows.end), static_cast<int32_t>(columns.begin),
          static_cast<int32_t>(columns.end)};
}

}  // namespace

std::array<Regions, 2> depthwise_regions(const DepthwiseParams& params, const HaloExtents& in, Part part,
                                         bool input_grad) {
  const Interval rows{0, input_grad ? params.in_height : params.out_height};
  const Interval columns{0, input_grad ? params.in_width : params.out_width};
  const Regions all{region(rows, columns), {}}, none{};
  if (part == Part::kAll) return {all, none};
  const auto& inside = input_grad ? interior_of_grad : interior;
  const Interval y =
      with_whole_borders(inside(params.y, params.in_height, params.out_height, in.rows_above > 0, in.rows_below > 0),
                         rows.end, kLeastBorderRows);
  Interval x =
      with_whole_borders(inside(params.x, params.in_width, params.out_width, in.columns_left > 0, in.columns_right > 0),
                         columns.end, kLeastBorderColumns);
  if (x.end < columns.end) x.end = x.end / 8 * 8;  // so that the interior's stores stay aligned
  // Of less than a quarter it hides less of the exchange than launches of its own cost.
  const bool worthwhile = !y.empty() && !x.empty() && 4 * y.size() * x.size() >= rows.size() * columns.size();
  if (!worthwhile)
    return part == Part::kInterior ? std::array<Regions, 2>{none, none} : std::array<Regions, 2>{all, none};
  if (part == Part::kInterior) return {Regions{region(y, x), {}}, none};
  return {Regions{region({0, y.begin}, columns), region({y.end, rows.end}, columns)},
          Regions{region(y, {0, x.begin}), region(y, {x.end, columns.end})}};
}

template <typename T>
void depthwise_cpu(const HaloPlanes<T>& in, const T* weight, const T* bias, T* out, const DepthwiseParams& params,
                   Part part, size_t most_shared) {
  run_depthwise(RunOnHost{most_shared}, in, weight, bias, out, params, part);
}

template <typename T>
void depthwise_input_grad_cpu(const HaloPlanes<T>& grad_out, const T* weight, T* grad_in, const DepthwiseParams& params,
                              Part part, size_t most_shared) {
  run_depthwise_input_grad(RunOnHost{most_shared}, grad_out, weight, grad_in, params, part);
}

#define TORCHTP_DEPTHWISE(T)                                                                                       \
  template void depthwise_cpu(const HaloPlanes<T>&, const T*, const T*, T*, const DepthwiseParams&, Part, size_t); \
  template void depthwise_input_grad_cpu(const HaloPlanes<T>&, const T*, T*, const DepthwiseParams&, Part, size_t);
TORCHTP_DEPTHWISE(float)
TORCHTP_DEPTHWISE(c10::BFloat16)
TORCHTP_DEPTHWISE(c10::Half)
#undef TORCHTP_DEPTHWISE

}  // namespace torchtp::kernels
