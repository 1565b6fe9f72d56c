#include "bindings/gradients.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "gradients/reducer.h"

namespace torchtp::bindings {
namespace {

using gradients::Compression;
using gradients::Event;
using gradients::Packing;
using gradients::Reducer;

Compression compression_of(const std::string& name) {
  if (name == "none") return Compression::kNone;
  if (name == "fp16") return Compression::kHalf;
  if (name == "bf16") return Compression::kBFloat16;
  throw pybind11::value_error("compression is 'none', 'fp16' or 'bf16', but it is '" + name + "'");
}

Packing packing_of(const std::string& name) {
  if (name == "auto") return Packing::kByDevice;
  if (name == "each") return Packing::kEach;
  if (name == "together") return Packing::kTogether;
  throw pybind11::value_error("packing is 'auto', 'each' or 'together', but it is '" + name + "'");
}

const char* name_of(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::kReady:
      return "ready";
    case Event::Kind::kStart:
      return "start";
    case Event::Kind::kEndOfBackward:
      return "end_of_backward";
    default:
      return "done";
  }
}

std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                const std::string& group_name, int64_t bucket_bytes, int64_t first_bucket_bytes,
                                const std::string& compression, bool average, const std::string& packing) {
  const gradients::Options options{bucket_bytes, first_bucket_bytes, compression_of(compression), average,
                                   packing_of(packing)};
  const pybind11::gil_scoped_release no_gil;
  return Reducer::create(std::move(parameters), std::move(names), c10d::resolve_process_group(group_name), options);
}

pybind11::dict statistics(const Reducer& reducer) {
  const gradients::Statistics statistics = reducer.statistics();
  pybind11::dict result;
  result["num_backwards"] = statistics.num_backwards;
  result["num_buckets"] = statistics.num_buckets;
  result["num_bytes"] = statistics.num_bytes;
  result["communication_seconds"] = statistics.communication_seconds;
  result["hidden_seconds"] = statistics.hidden_seconds;
  return result;
}

std::vector<std::pair<std::string, size_t>> events(const Reducer& reducer) {
  std::vector<std::pair<std::string, size_t>> result;
  for (const Event& event : reducer.events()) result.emplace_back(name_of(event.kind), event.index);
  return result;
}

}  // namespace

void bind_gradients(pybind11::module_& m) {
  namespace py = pybind11;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
      .def(py::init(&create), py::arg("parameters"), py::arg("names"), py::arg("group_name"), py::arg("bucket_bytes"),
           py::arg("first_bucket_bytes"), py::arg("compression"), py::arg("average"), py::arg("packing"))
      .def_property("sync", &Reducer::sync, &Reducer::set_sync)
      .def("set_interval", &Reducer::set_interval, py::arg("num_backwards"))
      .def_property_readonly("num_unreduced", &Reducer::num_unreduced)
      .def("clip_norm", &Reducer::clip_norm, no_gil, py::arg("most"))
      .def("reduce", &Reducer::reduce, no_gil)
      .def("prepare", &Reducer::prepare, no_gil)
      .def("watch", &Reducer::watch, no_gil, py::arg("output"))
      .def("record", &Reducer::record, py::arg("on"))
      .def("reset_statistics", &Reducer::reset_statistics)
      .def("statistics", &statistics)
      .def("events", &events)
      .def("bucket_names", &Reducer::bucket_names)
      .def("holds_gradient", &Reducer::holds_gradient, py::arg("parameter"));
}

}  // namespace torchtp::bindings
