#include "bindings/gradients.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "gradients/added_up.h"
#include "gradients/captured.h"
#include "gradients/hooked.h"
#include "gradients/reducer.h"

namespace torchtp::bindings {
namespace {

using gradients::CapturedGradients;
using gradients::Compression;
using gradients::Event;
using gradients::OwnHook;
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

// A reference that may be dropped without Python's lock, and after Python.
class Kept {
 public:
  explicit Kept(pybind11::object object) : object_(std::move(object)) {}
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    const pybind11::gil_scoped_acquire gil;
    object_ = {};
  }
  const pybind11::object& get() const { return object_; }

 private:
  pybind11::object object_;
};

OwnHook own_hook_of(pybind11::object function) {
  if (function.is_none()) return {};
  const auto hook = std::make_shared<const Kept>(std::move(function));
  const auto is_alone_on = [hook](const at::Tensor& parameter) {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::object hooks = pybind11::cast(parameter).attr("_backward_hooks");
    if (hooks.is_none()) return false;
    for (const auto& entry : hooks.cast<pybind11::dict>()) {
      if (!entry.second.is(hook->get())) return false;
    }
    return true;
  };
  const auto call = [hook](const at::Tensor& gradient) {
    const pybind11::gil_scoped_acquire gil;
    return hook->get()(gradient).cast<at::Tensor>();
  };
  const auto make_table = [hook](const at::Tensor& parameter) {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::object object = pybind11::cast(parameter);
    if (object.attr("_backward_hooks").is_none()) object.attr("register_hook")(hook->get());
  };
  return {is_alone_on, call, make_table};
}

gradients::Options options_of(int64_t bucket_bytes, int64_t first_bucket_bytes, const std::string& compression,
                              bool average, const std::string& packing) {
  return {bucket_bytes, first_bucket_bytes, compression_of(compression), average, packing_of(packing)};
}

void check(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names, int64_t bucket_bytes,
           int64_t first_bucket_bytes, const std::string& compression, bool average, const std::string& packing) {
  Reducer::check(parameters, names, options_of(bucket_bytes, first_bucket_bytes, compression, average, packing));
}

std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                const std::string& group_name, int64_t bucket_bytes, int64_t first_bucket_bytes,
                                const std::string& compression, bool average, const std::string& packing,
                                pybind11::object own_hook) {
  const gradients::Options options = options_of(bucket_bytes, first_bucket_bytes, compression, average, packing);
  OwnHook hook = own_hook_of(std::move(own_hook));
  const pybind11::gil_scoped_release no_gil;
  return Reducer::create(std::move(parameters), std::move(names), c10d::resolve_process_group(group_name), options,
                         std::move(hook));
}

std::unique_ptr<CapturedGradients> captured(std::vector<at::Tensor> parameters, const std::string& group_name,
                                            pybind11::object own_hook, pybind11::object is_cut_backward) {
  const auto asked = std::make_shared<const Kept>(std::move(is_cut_backward));
  const auto is_cut = [asked] {
    const pybind11::gil_scoped_acquire gil;
    return asked->get()().cast<bool>();
  };
  return std::make_unique<CapturedGradients>(std::move(parameters), c10d::resolve_process_group(group_name),
                                             own_hook_of(std::move(own_hook)), is_cut);
}

pybind11::dict statistics(const Reducer& reducer) {
  const gradients::Statistics statistics = [&] {
    const pybind11::gil_scoped_release no_gil;
    return reducer.statistics();
  }();
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
           py::arg("first_bucket_bytes"), py::arg("compression"), py::arg("average"), py::arg("packing"),
           py::arg("own_hook"))
      .def_static("check", &check, py::arg("parameters"), py::arg("names"), py::arg("bucket_bytes"),
                  py::arg("first_bucket_bytes"), py::arg("compression"), py::arg("average"), py::arg("packing"))
      .def_property("sync", py::cpp_function(&Reducer::sync, no_gil), py::cpp_function(&Reducer::set_sync, no_gil))
      .def("set_interval", &Reducer::set_interval, no_gil, py::arg("num_backwards"))
      .def_property_readonly("num_unreduced", py::cpp_function(&Reducer::num_unreduced, no_gil))
      .def_property_readonly("num_passes", py::cpp_function(&Reducer::num_passes, no_gil))
      .def("clip_norm", &Reducer::clip_norm, no_gil, py::arg("most"))
      .def("reduce", &Reducer::reduce, no_gil)
      .def("prepare", &Reducer::prepare, no_gil)
      .def("watch", &Reducer::watch, no_gil, py::arg("output"))
      .def("record", &Reducer::record, no_gil, py::arg("on"))
      .def("reset_statistics", &Reducer::reset_statistics, no_gil)
      .def("statistics", &statistics)
      .def("events", &events, no_gil)
      .def("bucket_names", &Reducer::bucket_names, no_gil)
      .def("holds_gradient", &Reducer::holds_gradient, no_gil, py::arg("parameter"));
  py::class_<CapturedGradients>(m, "CapturedGradients")
      .def(py::init(&captured), py::arg("parameters"), py::arg("group_name"), py::arg("own_hook"),
           py::arg("is_cut_backward"))
      .def("begin", &CapturedGradients::begin, no_gil);
  m.def("is_hooked", &gradients::is_hooked, py::arg("tensor"), py::arg("most_nodes"));
  m.def("is_for_subclass", &gradients::is_for_subclass, py::arg("gradient"));
}

}  // namespace torchtp::bindings
