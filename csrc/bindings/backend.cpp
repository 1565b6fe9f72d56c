#include "bindings/backend.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/handled_exception.h"
#include "backend/open_groups.h"
#include "backend/torchtp_backend.h"

namespace torchtp::bindings {

void bind_backend(pybind11::module_& m) {
  namespace py = pybind11;
  using backend::TorchtpBackend;

  py::class_<ForkGuard, std::shared_ptr<ForkGuard>>(m, "ForkGuard")
      .def(py::init())
      .def("before_fork", &ForkGuard::before_fork)
      .def("after_fork_in_parent", &ForkGuard::after_fork_in_parent)
      .def("after_fork_in_child", &ForkGuard::after_fork_in_child);

  py::class_<backend::OpenGroups, std::shared_ptr<backend::OpenGroups>>(m, "OpenGroups")
      .def(py::init())
      .def(
          "end",
          [](backend::OpenGroups& groups, const py::object& exception) {
            const std::string error = backend::described(exception);
            const py::gil_scoped_release release;
            groups.end(error);
          },
          py::arg("exception") = py::none());

  // torch._C's classes (Backend, Store) must be registered before the class that derives from one.
  py::module_::import("torch.distributed");
  py::class_<TorchtpBackend, c10d::Backend, c10::intrusive_ptr<TorchtpBackend>>(m, "TorchtpBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, const std::string& group_name,
                       const std::vector<uint64_t>& global_ranks, backend::DeviceGroup::Make make_device_group,
                       TorchtpBackend::MakeGroup make_group, std::shared_ptr<backend::Trace> trace,
                       std::shared_ptr<ForkGuard> fork_guard, const std::shared_ptr<backend::OpenGroups>& open_groups,
                       const c10::intrusive_ptr<TorchtpBackend>& default_group) {
             auto options = c10::make_intrusive<TorchtpBackend::Options>(timeout);
             options->group_name = group_name;
             options->global_ranks_in_group = global_ranks;
             TorchtpBackend::OfProcess of_process{std::move(trace), std::move(fork_guard),
                                                  default_group ? default_group->lifetime() : nullptr};
             auto made = c10::make_intrusive<TorchtpBackend>(store, rank, size, options, std::move(make_device_group),
                                                             std::move(make_group), std::move(of_process));
             if (open_groups) open_groups->add(made->lifetime());
             return made;
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("group_name"),
           py::arg("global_ranks"), py::arg("make_device_group"), py::arg("make_group"), py::arg("trace") = nullptr,
           py::arg("fork_guard") = nullptr, py::arg("open_groups") = nullptr, py::arg("default_group") = nullptr,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("hosts", &TorchtpBackend::hosts)
      .def_property_readonly("options", &TorchtpBackend::getBackendOptions)
      .def(
          "_set_inner_device",
          [](TorchtpBackend& self, const std::string& type) { self.set_inner_device(c10::Device(type).type()); },
          py::arg("type"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchtp::bindings
