// The Python module torchtp._C. Loading it registers the ops; its functions are what has no tensor in it.
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "backend/exchanges.h"
#include "bindings/backend.h"
#include "bindings/geometry.h"
#include "bindings/gradients.h"

PYBIND11_MODULE(_C, m) {
  m.attr("built_for_torch") = TORCHTP_BUILT_FOR_TORCH;

  m.def(
      "traffic",
      [](const std::string& group_name) {
        const auto traffic = torchtp::backend::spatial_group(group_name).traffic;
        pybind11::dict out;
        out["num_bytes"] = traffic->num_bytes.load();
        out["num_exchanges"] = traffic->num_exchanges.load();
        out["num_beyond_neighbours"] = traffic->num_beyond_neighbours.load();
        return out;
      },
      pybind11::arg("group_name"));
  m.def(
      "set_exchange",
      [](const std::string& group_name, const std::string& kind) {
        using torchtp::backend::ExchangeKind;
        static const std::map<std::string, ExchangeKind> kinds{{"auto", ExchangeKind::kAuto},
                                                               {"point_to_point", ExchangeKind::kPointToPoint},
                                                               {"none", ExchangeKind::kNone},
                                                               {"planned", ExchangeKind::kPlanned}};
        const auto found = kinds.find(kind);
        TORCH_CHECK_VALUE(found != kinds.end(), "set_exchange: kind is auto, point_to_point, none or planned, not ",
                          kind);
        torchtp::backend::set_exchange(group_name, found->second);
      },
      pybind11::arg("group_name"), pybind11::arg("kind"));

  torchtp::bindings::bind_geometry(m);
  torchtp::bindings::bind_backend(m);
  torchtp::bindings::bind_gradients(m);
}
