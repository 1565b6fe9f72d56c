#include "backend/hosts_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backend/host_message.h"
#include "backend/hosts_exchange.h"
#include "core/format.h"

namespace torchtp::backend {
namespace {

using std::chrono::milliseconds;

// What the first ranks of hosts swap at a call's beginning: of one size, so that no disagreement can change it. Small
// calls need nothing else.
constexpr size_t kPrintBytes = 64;
constexpr size_t kMeetBytes = 8192;
static_assert(sizeof(shm::Fingerprint) <= kPrintBytes);

constexpr int kMostTag = (1 << 29) - 1;  // of users; those of exchanges lie above

template <typename Place>
std::vector<Place> places_of(const std::vector<std::vector<int>>& hosts) {
  size_t size = 0;
  for (const std::vector<int>& host : hosts) size += host.size();
  std::vector<Place> places(size);
  for (int h = 0; h < static_cast<int>(hosts.size()); ++h) {
    for (int i = 0; i < static_cast<int>(hosts[h].size()); ++i) places[hosts[h][i]] = {h, i};
  }
  return places;
}

int largest(const std::vector<std::vector<int>>& hosts) {
  size_t most = 1;
  for (const std::vector<int>& host : hosts) most = std::max(most, host.size());
  return static_cast<int>(most);
}

bool same(const shm::Fingerprint& a, const shm::Fingerprint& b) {
  return a.sequence == b.sequence && a.kind == b.kind && a.reduce_op == b.reduce_op && a.dtype == b.dtype &&
         a.flags == b.flags && a.root == b.root && a.count == b.count;
}

}  // namespace

HostsEngine::HostsEngine(std::vector<std::vector<int>> hosts, int rank, std::shared_ptr<shm::Group> host,
                         std::map<int, Fd> streams, std::map<int, Fd> mail, std::shared_ptr<ForkGuard> fork_guard)
    : hosts_(std::move(hosts)),
      rank_(rank),
      places_(places_of<Place>(hosts_)),
      size_(static_cast<int>(places_.size())),
      here_(places_[rank]),
      num_pieces_(largest(hosts_)),
      host_(std::move(host)),
      timeout_ms_(host_->timeout().count()),
      call_timeout_ms_(timeout_ms_.load()),
      links_(std::make_shared<HostLinks>(std::move(streams), std::move(mail), host_, rank, std::move(fork_guard))),
      watch_(std::make_shared<MessageWatch>()) {}

HostsEngine::~HostsEngine() {
  if (host_->is_forked()) {
    ForkGuard::leave_as_it_is(links_);
    ForkGuard::leave_as_it_is(watch_);
  } else {
    watch_->stop();
    links_->close("");
  }
}

size_t HostsEngine::most_inline() { return kMeetBytes - kPrintBytes; }

// Who waits for another host must not be overtaken by who waits for it, or the cause would name the wrong rank.
void HostsEngine::set_timeout(milliseconds timeout) {
  timeout_ms_ = timeout.count();
  call_timeout_ms_ = timeout.count();
  host_->set_timeout(timeout);
}

void HostsEngine::set_call_timeout(milliseconds timeout) { call_timeout_ms_ = timeout.count(); }

milliseconds HostsEngine::patience() const {
  const milliseconds timeout(call_timeout_ms_.load());
  return std::min(timeout / 4 + milliseconds(200), milliseconds(5000));
}

Deadline HostsEngine::between_hosts() const { return Deadline(milliseconds(call_timeout_ms_.load()) + patience()); }

void HostsEngine::abort(const std::string& why) noexcept {
  host_->abort(why);
  links_->close(why);
}

void HostsEngine::handle_signals(const std::function<std::string()>& where) {
  try {
    host_->handle_signals(where);
  } catch (...) {
    links_->close_if_aborted();
    throw;
  }
}

shm::Presence HostsEngine::presence(int rank) const {
  const bool has_died = rank != rank_ && links_->has_lost(rank);
  return has_died ? shm::Presence::kDied : shm::Presence::kThere;
}

void HostsEngine::stop(const std::string& error) {
  watch_->stop();
  links_->part(error);
  host_->leave(error);
}

void HostsEngine::guarded(const std::function<void()>& body) {
  try {
    host_->check();
    host_->set_round_timeout(milliseconds(call_timeout_ms_.load()));
    body();
  } catch (...) {
    links_->close_if_aborted();
    throw;
  }
}

std::vector<std::vector<std::byte>> HostsEngine::meet(const shm::Fingerprint& print, const std::byte* mine,
                                                      size_t num_bytes) {
  host_->set_round_timeout(milliseconds(call_timeout_ms_.load()) + 2 * patience());
  std::vector<std::vector<std::byte>> all(num_hosts());
  if (here_.index != 0) return all;
  for (auto& message : all) message.assign(kMeetBytes, std::byte{0});
  std::memcpy(all[here_.host].data(), &print, sizeof(print));
  if (num_bytes > 0) std::memcpy(all[here_.host].data() + kPrintBytes, mine, num_bytes);
  std::vector<Transfer> sends, receives;
  for (int h = 0; h < num_hosts(); ++h) {
    if (h == here_.host) continue;
    receives.push_back({hosts_[h][0], all[h].data(), kMeetBytes});
    sends.push_back({hosts_[h][0], all[here_.host].data(), kMeetBytes});
  }
  finish(post(sends, receives), print);

  std::vector<shm::Fingerprint> prints(num_hosts());
  for (int h = 0; h < num_hosts(); ++h) std::memcpy(&prints[h], all[h].data(), sizeof(prints[h]));
  for (int h = 1; h < num_hosts(); ++h) {
    if (same(prints[0], prints[h])) continue;
    host_->abort(cat("ranks disagree on what to do: rank ", hosts_[0][0], " calls ", collectives::describe(prints[0]),
                     ", rank ", hosts_[h][0], " calls ", collectives::describe(prints[h])));
    host_->check();
  }
  for (auto& message : all) message.erase(message.begin(), message.begin() + kPrintBytes);
  return all;
}

void HostsEngine::settle(const shm::Fingerprint& print) {
  host_->round(print);
  meet(print, nullptr, 0);
  host_->round(print);
}

std::vector<HostLinks::MessagePtr> HostsEngine::post(const std::vector<Transfer>& sends,
                                                     const std::vector<Transfer>& receives) {
  std::vector<HostLinks::MessagePtr> messages;
  for (const Transfer& each : receives) {
    messages.push_back(links_->stream_from(each.peer, each.data, each.num_bytes));
  }
  for (const Transfer& each : sends) {
    messages.push_back(links_->stream_to(each.peer, each.data, each.num_bytes));
  }
  return messages;
}

void HostsEngine::finish(const std::vector<HostLinks::MessagePtr>& messages, const shm::Fingerprint& print) {
  const Deadline deadline = between_hosts();
  const std::string call = collectives::describe(print);
  for (const HostLinks::MessagePtr& message : messages) links_->wait(message, deadline, call);
}

void HostsEngine::agree(const shm::Fingerprint& fingerprint) {
  guarded([&] { settle(fingerprint); });
}

void HostsEngine::barrier(uint64_t sequence) {
  agree(collectives::fingerprint(sequence, collectives::Kind::kBarrier, 0, at::ScalarType::Undefined));
}

Engine::MessagePtr HostsEngine::send(const at::Tensor& tensor, int peer, int tag) {
  check_message(tensor, peer, tag, false);
  return watch_->add(c10::make_intrusive<HostMessage>(links_, rank_, c10d::OpType::SEND, "torchtp:send", tensor, peer,
                                                      tag, milliseconds(timeout_ms_.load())));
}

Engine::MessagePtr HostsEngine::recv(const at::Tensor& tensor, int peer, int tag) {
  check_message(tensor, peer, tag, true);
  return watch_->add(c10::make_intrusive<HostMessage>(links_, rank_, c10d::OpType::RECV, "torchtp:recv", tensor, peer,
                                                      tag, milliseconds(timeout_ms_.load())));
}

Engine::MessagePtr HostsEngine::recv_any(const at::Tensor& tensor, int tag) {
  const int anyone = rank_ == 0 ? size_ - 1 : 0;
  check_message(tensor, anyone, tag, true);
  return watch_->add(c10::make_intrusive<HostMessage>(links_, rank_, c10d::OpType::RECVANYSOURCE,
                                                      "torchtp:recvAnySource", tensor, -1, tag,
                                                      milliseconds(timeout_ms_.load())));
}

void HostsEngine::check_message(const at::Tensor& tensor, int peer, int tag, bool receives) const {
  const char* const what = receives ? "recv" : "send";
  check_tensor(tensor, what);
  if (receives) check_writable(tensor, what);
  TORCH_CHECK(peer >= 0 && peer < size_ && peer != rank_, "torchtp ", what,
              ": the peer must be another rank of the group (0 to ", size_ - 1, "), got ", peer, " on rank ", rank_);
  TORCH_CHECK(tag >= 0 && tag <= kMostTag, "torchtp ", what, ": a group of several hosts has tags of 0 to ", kMostTag,
              ", got ", tag);
}

std::shared_ptr<exchange::Exchange> HostsEngine::make_exchange() {
  std::vector<int> indices(size_, -1);
  for (int r = 0; r < size_; ++r) {
    if (is_here(r)) indices[r] = places_[r].index;
  }
  const auto post = [links = links_, host = host_, rank = rank_](const at::Tensor& buffer, int peer, int tag,
                                                                 bool sends) -> c10::intrusive_ptr<c10d::Work> {
    const auto op = sends ? c10d::OpType::SEND : c10d::OpType::RECV;
    return c10::make_intrusive<HostMessage>(links, rank, op, "torchtp:exchange", buffer, peer, tag, host->timeout());
  };
  return std::make_shared<HostsExchange>(rank_, std::move(indices), host_, post,
                                         [links = links_] { links->close_if_aborted(); });
}

}  // namespace torchtp::backend
