#include "bindings/exchange.h"

#include <cstring>
#include <map>
#include <mutex>

#include "backend/device_exchange_of.h"
#include "backend/device_exchanges.h"
#include "backend/exchanges.h"
#include "core/format.h"
#include "exchange/bytes_on_device.h"
#include "exchange/thread_exchange.h"
#include "spatial/halos.h"

namespace torchtp::bindings {
namespace {

namespace py = pybind11;
using backend::ExchangeKind;

class BytesSource final : public exchange::Source {
 public:
  explicit BytesSource(std::string bytes) : bytes_(std::move(bytes)) {}
  void read(size_t offset, std::byte* out, size_t num_bytes) const override {
    std::memcpy(out, bytes_.data() + offset, num_bytes);
  }

 private:
  const std::string bytes_;
};

class BytesSink final : public exchange::Sink {
 public:
  explicit BytesSink(std::shared_ptr<int> counter) : counter_(std::move(counter)) {}
  void write(uint32_t sent_layout, size_t offset, const std::byte* in, size_t num_bytes) override {
    if (offset != bytes.size()) throw Error(cat("a sink has ", bytes.size(), " bytes and is given offset ", offset));
    if (offset == 0) position = (*counter_)++;
    layout = sent_layout;
    bytes.append(reinterpret_cast<const char*>(in), num_bytes);
  }

  std::string bytes;
  uint32_t layout = 0;
  int position = -1;  // among the sinks of its exchange, in the order of writing; -1: never written

 private:
  std::shared_ptr<int> counter_;
};

// An exchange whose messages are byte strings.
class BytesExchange {
 public:
  explicit BytesExchange(std::shared_ptr<exchange::Exchange> inner) : inner_(std::move(inner)) {}

  int rank() const { return inner_->rank(); }
  int size() const { return inner_->size(); }

  uint64_t start(const std::vector<std::tuple<int, uint32_t, std::string>>& sends,
                 const std::vector<std::pair<int, size_t>>& receives) {
    std::vector<exchange::Send> out;
    for (const auto& [peer, layout, bytes] : sends) {
      out.push_back({peer, layout, bytes.size(), std::make_shared<BytesSource>(bytes)});
    }
    const auto counter = std::make_shared<int>(0);
    std::vector<std::shared_ptr<BytesSink>> sinks;
    std::vector<exchange::Receive> in;
    for (const auto& [peer, num_bytes] : receives) {
      sinks.push_back(std::make_shared<BytesSink>(counter));
      in.push_back({peer, num_bytes, sinks.back()});
    }
    const py::gil_scoped_release no_gil;
    const uint64_t ticket = inner_->start(std::move(out), std::move(in));
    const std::lock_guard<std::mutex> lock(mutex_);
    sinks_[ticket] = std::move(sinks);
    return ticket;
  }

  // For each receive: the sender's layout, the bytes, and when it was written.
  std::vector<std::tuple<uint32_t, py::bytes, int>> finish(uint64_t ticket) {
    std::vector<std::shared_ptr<BytesSink>> sinks;
    {
      const py::gil_scoped_release no_gil;
      inner_->finish(ticket);
      const std::lock_guard<std::mutex> lock(mutex_);
      sinks = std::move(sinks_[ticket]);
      sinks_.erase(ticket);
    }
    std::vector<std::tuple<uint32_t, py::bytes, int>> out;
    for (const auto& sink : sinks) out.emplace_back(sink->layout, py::bytes(sink->bytes), sink->position);
    return out;
  }

 private:
  std::shared_ptr<exchange::Exchange> inner_;
  std::mutex mutex_;
  std::map<uint64_t, std::vector<std::shared_ptr<BytesSink>>> sinks_;
};

void set_exchange(const std::string& group_name, const std::string& kind) {
  static const std::map<std::string, ExchangeKind> kinds{{"auto", ExchangeKind::kAuto},
                                                         {"point_to_point", ExchangeKind::kPointToPoint},
                                                         {"none", ExchangeKind::kNone},
                                                         {"planned", ExchangeKind::kPlanned}};
  const auto found = kinds.find(kind);
  if (found != kinds.end()) return backend::set_exchange(group_name, found->second);
  TORCH_CHECK_VALUE(kind == "peer_memory" || kind == "grouped" || kind == "staged",
                    "set_exchange: kind is auto, point_to_point, none, planned, peer_memory, grouped or staged, not ",
                    kind);
  backend::set_device_exchange(group_name, exchange::device_kind_of(kind, "kind"));
}

std::shared_ptr<BytesExchange> exchange_of(const std::string& group_name, const std::string& device_name) {
  const auto group = backend::spatial_group(group_name);
  const c10::Device device(device_name);
  TORCH_CHECK_VALUE(device.is_cpu() || device.has_index(), "exchange_of: say which device, as cuda:0");
  if (const auto on_device = backend::device_exchange_of(group, device)) {
    return std::make_shared<BytesExchange>(
        std::make_shared<exchange::BytesOnDevice>(on_device, backend::DeviceExchanges::kernels(device)));
  }
  return std::make_shared<BytesExchange>(group.exchange);
}

// Without Python's lock: who makes one just now holds the mutex, and may have signals handled meanwhile.
auto made_exchanges(const std::string& group_name) {
  const py::gil_scoped_release no_gil;
  return backend::device_exchanges(group_name)->made();
}

// What moves halos of the group's tensors on devices, as far as it has been used.
py::list device_exchanges(const std::string& group_name) {
  py::list out;
  for (const auto& made : made_exchanges(group_name)) {
    py::dict entry;
    entry["device"] = made.device;
    entry["kind"] = made.exchange->name();
    entry["why"] = made.why;
    entry["memory_bytes"] = made.exchange->memory_bytes();
    out.append(std::move(entry));
  }
  return out;
}

// For tests of the choice: facts of every rank as dicts; what is left out is false or empty.
std::pair<std::string, std::string> choose_device_exchange(const std::vector<py::dict>& ranks) {
  std::vector<exchange::DeviceFacts> facts;
  for (const py::dict& rank : ranks) {
    const auto get = [&](const char* key, auto otherwise) {
      return rank.contains(key) ? rank[key].template cast<decltype(otherwise)>() : otherwise;
    };
    exchange::DeviceFacts fact;
    fact.host = get("host", std::string());
    fact.device = get("device", std::string());
    fact.seen = get("seen", std::vector<std::string>());
    fact.reachable = get("reachable", std::vector<std::string>());
    fact.symmetric_memory = get("symmetric_memory", false);
    fact.shares_devices = get("shares_devices", false);
    fact.grouped = get("grouped", false);
    fact.wish = exchange::device_kind_of(get("wish", std::string("auto")), "wish");
    facts.push_back(exchange::DeviceFacts::unpacked(fact.packed()));
  }
  const auto choice = exchange::choose(facts);
  return {exchange::name_of(choice.kind), choice.why};
}

void check_exchanges(const std::string& group_name) {
  for (const auto& made : backend::device_exchanges(group_name)->made()) made.exchange->check();
}

// What Halos brings, copied. Its `stacked` tensors are stacked along `stacked_dim`.
std::tuple<at::Tensor, at::Tensor> pull_halos(const std::vector<at::Tensor>& stacked, int64_t stacked_dim, int64_t dim,
                                              int64_t extent, const std::vector<int64_t>& begins,
                                              const std::vector<int64_t>& ends, const std::string& group_name) {
  std::vector<Interval> wanted;
  for (size_t rank = 0; rank < begins.size(); ++rank) wanted.push_back({begins[rank], ends.at(rank)});
  const spatial::Cut cut{dim, extent, backend::spatial_group(group_name)};
  spatial::Halos halos(stacked, stacked_dim, cut, wanted);
  halos.wait();
  return {halos.before().clone(), halos.after().clone()};
}

}  // namespace

void bind_exchange(py::module_& m) {
  py::class_<BytesExchange, std::shared_ptr<BytesExchange>>(m, "BytesExchange")
      .def_property_readonly("rank", &BytesExchange::rank)
      .def_property_readonly("size", &BytesExchange::size)
      .def("start", &BytesExchange::start, py::arg("sends"), py::arg("receives"))
      .def("finish", &BytesExchange::finish, py::arg("ticket"));
  m.def("exchange_of", &exchange_of, py::arg("group_name"), py::arg("device") = "cpu",
        py::call_guard<py::gil_scoped_release>());
  m.def("device_exchanges", &device_exchanges, py::arg("group_name"));
  m.def("check_exchanges", &check_exchanges, py::arg("group_name"), py::call_guard<py::gil_scoped_release>());
  m.def("choose_device_exchange", &choose_device_exchange, py::arg("ranks"));
  m.def(
      "thread_exchanges",
      [](int size, double timeout_seconds) {
        const auto hub =
            exchange::make_thread_hub(size, std::chrono::milliseconds(static_cast<int64_t>(timeout_seconds * 1e3)));
        std::vector<std::shared_ptr<BytesExchange>> ranks;
        for (int rank = 0; rank < size; ++rank) {
          ranks.push_back(std::make_shared<BytesExchange>(std::make_shared<exchange::ThreadExchange>(hub, rank)));
        }
        return ranks;
      },
      py::arg("size"), py::arg("timeout_seconds"));
  m.def("set_exchange", &set_exchange, py::arg("group_name"), py::arg("kind"));
  m.def("pull_halos", &pull_halos, py::arg("stacked"), py::arg("stacked_dim"), py::arg("dim"), py::arg("extent"),
        py::arg("begins"), py::arg("ends"), py::arg("group_name"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "traffic",
      [](const std::string& group_name) {
        const auto traffic = [&] {
          const py::gil_scoped_release no_gil;
          return backend::spatial_group(group_name).traffic;
        }();
        py::dict out;
        out["num_bytes"] = traffic->num_bytes.load();
        out["num_exchanges"] = traffic->num_exchanges.load();
        out["num_beyond_neighbours"] = traffic->num_beyond_neighbours.load();
        return out;
      },
      py::arg("group_name"));
}

}  // namespace torchtp::bindings
