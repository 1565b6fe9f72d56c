#include "core/fd.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
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

Fd Fd::tcp_socket(int family) {
  Fd made(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) throw_errno("cannot make a TCP socket");
  return made;
}

Fd Fd::event() {
  Fd made(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!made) throw_errno("cannot make an eventfd");
  return made;
}

Fd Fd::epoll() {
  Fd made(::epoll_create1(EPOLL_CLOEXEC));
  if (!made) throw_errno("cannot make an epoll descriptor");
  return made;
}

Fd Fd::accept(const Fd& listener, int flags) {
  return Fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | flags));
}

}  // namespace torchtp
