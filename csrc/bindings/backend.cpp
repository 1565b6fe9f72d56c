#include "bindings/backend.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/torchtp_backend.h"

namespace torchtp::bindings {

void bind_backend(pybind11::module_& m) {
  namespace py = pybind11;
  using backend::TorchtpBackend;

  // torch._C's classes (Backend, Store) must be registered before the class that derives from one.
  py::module_::import("torch.distributed");
  py::class_<TorchtpBackend, c10d::Backend, c10::intrusive_ptr<TorchtpBackend>>(m, "TorchtpBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, const std::string& group_name,
                       const std::vector<uint64_t>& global_ranks) {
             auto options = c10::make_intrusive<TorchtpBackend::Options>(timeout);
             options->group_name = group_name;
             options->global_ranks_in_group = global_ranks;
             return c10::make_intrusive<TorchtpBackend>(store, rank, size, options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("group_name"),
           py::arg("global_ranks"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchtp::bindings
