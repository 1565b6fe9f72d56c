#include "bindings/geometry.h"

#include "core/interval.h"
#include "core/pull_plan.h"

namespace torchtp::bindings {
namespace {

namespace py = pybind11;
using Pair = std::pair<int64_t, int64_t>;

Pair to_pair(const Interval& interval) { return {interval.begin, interval.end}; }

py::list to_list(const std::vector<PullPlan::Part>& parts) {
  py::list out;
  for (const PullPlan::Part& part : parts) out.append(py::make_tuple(part.peer, part.rows.begin, part.rows.end));
  return out;
}

}  // namespace

void bind_geometry(py::module_& m) {
  m.def(
      "owned",
      [](int64_t extent, int64_t num_shards, int64_t shard) { return to_pair(owned(extent, num_shards, shard)); },
      py::arg("extent"), py::arg("num_shards"), py::arg("shard"));
  m.def(
      "output_extent",
      [](int64_t extent, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, bool ceil_mode) {
        return output_extent({kernel, stride, padding, dilation}, extent, ceil_mode);
      },
      py::arg("extent"), py::arg("kernel"), py::arg("stride"), py::arg("padding"), py::arg("dilation"),
      py::arg("ceil_mode") = false);
  m.def(
      "transposed_extent",
      [](int64_t extent, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation, int64_t output_padding) {
        return transposed_extent({kernel, stride, padding, dilation}, extent, output_padding);
      },
      py::arg("extent"), py::arg("kernel"), py::arg("stride"), py::arg("padding"), py::arg("dilation"),
      py::arg("output_padding"));
  m.def(
      "read_by",
      [](const Pair& outputs, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
        return to_pair(read_by({outputs.first, outputs.second}, {kernel, stride, padding, dilation}));
      },
      py::arg("outputs"), py::arg("kernel"), py::arg("stride"), py::arg("padding"), py::arg("dilation"));
  m.def(
      "readers_of",
      [](const Pair& inputs, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
        return to_pair(readers_of({inputs.first, inputs.second}, {kernel, stride, padding, dilation}));
      },
      py::arg("inputs"), py::arg("kernel"), py::arg("stride"), py::arg("padding"), py::arg("dilation"));
  m.def(
      "pull_plan",
      [](int64_t extent, int rank, const std::vector<Pair>& wanted) {
        std::vector<Interval> intervals;
        for (const Pair& pair : wanted) intervals.push_back({pair.first, pair.second});
        const PullPlan plan = make_pull_plan(extent, rank, intervals);
        py::dict out;
        out["own"] = to_pair(plan.own);
        out["wanted"] = to_pair(plan.wanted);
        out["kept"] = to_pair(plan.kept);
        out["sends"] = to_list(plan.sends);
        out["receives"] = to_list(plan.receives);
        out["anyone_moves"] = plan.anyone_moves;
        return out;
      },
      py::arg("extent"), py::arg("rank"), py::arg("wanted"));
}

}  // namespace torchtp::bindings
