#include "shm/liveness.h"

#include <fcntl.h>

#include "core/format.h"

namespace torchtp::shm {

namespace {

struct flock byte_of(int rank, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Liveness::Liveness(const Fd& file, int rank, const std::vector<std::string>& identities)
    : file_(file), num_ranks_(static_cast<int>(identities.size())) {
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (identities[peer] != identities[rank]) watched_ |= uint64_t{1} << peer;
  }
  struct flock lock = byte_of(rank, F_WRLCK);
  if (fcntl(file_.get(), F_SETLK, &lock) != 0) throw_errno("cannot lock a byte of the shared-memory segment");
}

bool Liveness::watch() {
  const uint64_t wanted = watched_;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (watched_ >> peer & 1 && !is_locked(peer)) watched_ &= ~(uint64_t{1} << peer);
  }
  return watched_ == wanted;
}

bool Liveness::is_dead(int rank) const { return watched_ >> rank & 1 && !is_locked(rank); }

std::optional<Process> Liveness::process(int rank) const {
  struct flock lock = byte_of(rank, F_WRLCK);
  if (fcntl(file_.get(), F_GETLK, &lock) != 0 || lock.l_type == F_UNLCK || lock.l_pid <= 0) return std::nullopt;
  return look_at(lock.l_pid);
}

bool Liveness::is_locked(int rank) const {
  struct flock lock = byte_of(rank, F_WRLCK);
  // Whatever keeps the kernel from telling is not a death.
  return fcntl(file_.get(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace torchtp::shm
