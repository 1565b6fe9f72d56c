#include "backend/make_engine.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "backend/hosts_engine.h"
#include "backend/shared_memory_engine.h"
#include "backend/signal_handlers.h"
#include "backend/store_bootstrap.h"
#include "backend/work.h"
#include "core/error.h"
#include "core/format.h"
#include "net/connect.h"
#include "shm/hosts.h"

namespace torchtp::backend {
namespace {

constexpr auto kLongestSearch = std::chrono::minutes(1);
constexpr size_t kMembersShown = 8;  // and the last

constexpr char kNoHosts[] = "cannot make a process group of several hosts";

enum Use : int { kMail, kStream };

struct Connections {
  std::map<int, Fd> mail;     // to all ranks
  std::map<int, Fd> streams;  // to those of other hosts
};

Connections connect_hosts(StoreBootstrap& bootstrap, const std::vector<int>& here) {
  std::optional<net::Door> door;
  const std::vector<std::string> introductions = shm::together(bootstrap, kNoHosts, [&] {
    const char* const interfaces = std::getenv("GLOO_SOCKET_IFNAME");
    door.emplace(interfaces != nullptr ? interfaces : "");
    return door->introduction();
  });
  std::set<net::Line> lines;
  for (int rank = 0; rank < bootstrap.size(); ++rank) {
    if (rank == bootstrap.rank()) continue;
    lines.insert({rank, kMail});
    if (std::find(here.begin(), here.end(), rank) == here.end()) lines.insert({rank, kStream});
  }
  Connections made;
  shm::together(bootstrap, kNoHosts, [&] {
    // So that all hear of its end before they have waited long enough.
    const Deadline deadline(std::min<std::chrono::milliseconds>(bootstrap.left() * 4 / 5, kLongestSearch));
    const auto look = [&] { bootstrap.look(); };  // a rank that has died calls nobody
    try {
      for (auto& [line, socket] : door->connect(bootstrap.rank(), lines, introductions, deadline, look)) {
        (line.use == kMail ? made.mail : made.streams)[line.peer] = std::move(socket);
      }
    } catch (const net::Unreachable& error) {
      bootstrap.tell_of_failure(cat("rank ", bootstrap.rank(), " ", kNoHosts, ": ", error.what()), error.peer());
      throw;
    }
    return std::string();
  });
  return made;
}

std::shared_ptr<Engine> make_hosts_engine(StoreBootstrap& bootstrap, const std::vector<std::vector<int>>& hosts,
                                          const shm::GroupOptions& group_options, const EngineOptions& options) {
  const auto here = std::find_if(hosts.begin(), hosts.end(), [&](const std::vector<int>& host) {
    return std::find(host.begin(), host.end(), bootstrap.rank()) != host.end();
  });
  std::shared_ptr<shm::Group> group;
  shm::together(bootstrap, kNoHosts, [&] {
    StoreBootstrap inside = bootstrap.among(*here);
    shm::GroupOptions inside_options = group_options;
    inside_options.called = *here;
    group = shm::Group::create(inside, inside_options);
    return std::string();
  });
  std::shared_ptr<HostsEngine> engine;
  try {
    Connections connections = connect_hosts(bootstrap, *here);
    shm::together(bootstrap, kNoHosts, [&] {
      engine = std::make_shared<HostsEngine>(hosts, bootstrap.rank(), group, std::move(connections.streams),
                                             std::move(connections.mail), options.fork_guard);
      bootstrap.watch([engine](int rank) { return engine->presence(rank) == shm::Presence::kDied; });
      return std::string();
    });
  } catch (const std::exception& error) {
    group->abort(error.what());  // the others may be in the last round already: one of them may know better
    if (engine) engine->abort(error.what());
    group->check();
    throw;
  }
  engine->agree(shm::making());  // without the store, as inside each host
  return engine;
}

// " (global ranks 4, 5)", where they have other numbers in the group.
std::string members(const std::vector<uint64_t>& global_ranks) {
  std::vector<uint64_t> same(global_ranks.size());
  std::iota(same.begin(), same.end(), 0);
  if (global_ranks == same) return "";
  std::string all;
  for (size_t i = 0; i < global_ranks.size(); ++i) {
    const bool shown = i < kMembersShown || i + 1 == global_ranks.size();
    if (shown || i == kMembersShown) all += cat(i == 0 ? "" : ", ", shown ? std::to_string(global_ranks[i]) : "...");
  }
  return cat(" (global rank", global_ranks.size() == 1 ? " " : "s ", all, ")");
}

}  // namespace

MadeEngine make_engine(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const EngineOptions& options) {
  std::optional<StoreBootstrap> met;
  try {
    StoreBootstrap& bootstrap = met.emplace(store, rank, size, options.timeout, options.before);
    shm::GroupOptions group_options;
    group_options.timeout = options.timeout;
    group_options.name = options.group_name;
    group_options.members = members(options.global_ranks);
    group_options.whereabouts = options.whereabouts;
    group_options.describe = collectives::describe;
    group_options.handle_signals = run_signal_handlers;
    const auto hosts = shm::find_hosts(bootstrap, std::min<std::chrono::milliseconds>(options.timeout, kLongestSearch));
    if (hosts.size() > 1) return {make_hosts_engine(bootstrap, hosts, group_options, options), bootstrap.prefix()};
    return {std::make_shared<SharedMemoryEngine>(shm::Group::create(bootstrap, group_options)), bootstrap.prefix()};
  } catch (...) {
    if (met && met->interruption()) std::rethrow_exception(met->interruption());
    std::rethrow_exception(as_dist_error(std::current_exception()));
  }
}

}  // namespace torchtp::backend
