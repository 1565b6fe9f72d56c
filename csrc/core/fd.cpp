#include "core/fd.h"

#include <sys/mman.h>
#include <sys/socket.h>

#include "core/format.h"

namespace torchtp {

Fd Fd::memory(const char* name) {
  Fd file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw_errno("cannot make an anonymous file (memfd_create)");
  return file;
}

Fd Fd::unix_socket() {
  Fd made(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!made) throw_errno("cannot make a UNIX socket");
  return made;
}

Fd Fd::accept(const Fd& listener) { return Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)); }

}  // namespace torchtp
