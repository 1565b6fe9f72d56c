#include "bindings/trace.h"

#include <torch/csrc/utils/pybind.h>

#include "backend/trace.h"

namespace torchtp::bindings {

namespace {

namespace py = pybind11;
using backend::Recorder;
using backend::Tally;
using backend::Trace;

py::dict to_dict(const Tally& tally) {
  py::dict row;
  row["op"] = tally.op;
  row["most_bytes"] = uint64_t{1} << tally.size_class;
  row["count"] = tally.count;
  row["failed"] = tally.failed;
  row["num_bytes"] = tally.num_bytes;
  row["total_ns"] = tally.total_ns;
  row["queued_ns"] = tally.queued_ns;
  row["waited_ns"] = tally.waited_ns;
  row["shortest_ns"] = tally.shortest_ns;
  row["median_ns"] = tally.durations.quantile(0.5);
  row["late_ns"] = tally.durations.quantile(0.99);
  row["longest_ns"] = tally.longest_ns;
  return row;
}

py::dict to_dict(const Recorder& recorder) {
  const Recorder::Identity& identity = recorder.identity();
  const backend::Statistics statistics = recorder.statistics();
  py::list rows, waits;
  for (const Tally& tally : statistics.tallies()) rows.append(to_dict(tally));
  for (int rank = 0; rank < identity.size; ++rank) {
    py::list of_rank;
    for (int late = 0; late < identity.size; ++late) of_rank.append(statistics.waited(rank, late));
    waits.append(of_rank);
  }
  py::dict group;
  group["group"] = identity.group;
  group["rank"] = identity.rank;
  group["size"] = identity.size;
  group["global_ranks"] = identity.global_ranks;
  group["rows"] = rows;
  group["waited_ns"] = waits;
  return group;
}

}  // namespace

void bind_trace(py::module_& m) {
  py::class_<Trace, std::shared_ptr<Trace>>(m, "Trace")
      .def(py::init<>())
      .def_property_readonly("path", [](const Trace& trace) { return py::bytes(trace.path()); })
      .def("write_to", &Trace::write_to, py::arg("path"), py::arg("signals"), py::call_guard<py::gil_scoped_release>())
      .def(
          "dump",
          [](Trace& trace, const std::string& reason, const std::string& path) {  // a path need not be text
            std::string file;
            {
              const py::gil_scoped_release released;
              file = trace.dump(reason, path);
            }
            return py::bytes(file);
          },
          py::arg("reason"), py::arg("path") = "")
      .def("statistics",
           [](const Trace& trace) {
             py::list groups;
             for (const auto& recorder : trace.recorders()) groups.append(to_dict(*recorder));
             return groups;
           })
      .def("reset_statistics", [](const Trace& trace) {
        for (const auto& recorder : trace.recorders()) recorder->reset_statistics();
      });
}

}  // namespace torchtp::bindings
