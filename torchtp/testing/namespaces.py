"""Several hosts on one machine, for tests and benchmarks: network namespaces, joined by a bridge.

A namespace has no name and lives as long as a process in it, which ends with ours: nothing is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from torchtp.testing import ranks
from torchtp.testing.workers import Worker

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Namespace:
    def __init__(self) -> None:
        self._owner = os.getpid()
        # It says a line when it is inside; cat then waits for the end of its input.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_end_with_parent,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if not self._holder.stdout.readline():
            text = self._holder.stderr.read().decode().strip()
            self.close()
            raise OSError(text)

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/ns/net"

    @property
    def inside(self) -> list[str]:
        return ["nsenter", f"--net={self.path}"]

    def ip(self, *command: str) -> None:
        done = subprocess.run([*self.inside, "ip", *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"ip {' '.join(command)}: {done.stderr.strip()}")

    def close(self) -> None:
        if os.getpid() == self._owner:  # an error of a forked process passes here too
            self._holder.kill()
            self._holder.communicate()


@dataclass(frozen=True)
class _Network:
    bridge: _Namespace
    hosts: list[_Namespace]


@contextlib.contextmanager
def _network(num_hosts: int) -> Iterator[_Network]:
    """Hosts with the addresses 10.77.0.1 and so on; who enters the bridge is at 10.77.0.254."""
    with contextlib.ExitStack() as stack:

        def make() -> _Namespace:
            namespace = _Namespace()
            stack.callback(namespace.close)
            return namespace

        bridge, hosts = make(), [make() for _ in range(num_hosts)]
        bridge.ip("link", "add", "bridge", "type", "bridge")
        bridge.ip("address", "add", "10.77.0.254/24", "dev", "bridge")
        bridge.ip("link", "set", "bridge", "up")
        bridge.ip("link", "set", "lo", "up")
        for index, host in enumerate(hosts):
            port = f"port{index}"
            bridge.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            bridge.ip("link", "set", port, "master", "bridge", "up")
            host.ip("address", "add", f"10.77.0.{index + 1}/24", "dev", "eth0")
            host.ip("link", "set", "eth0", "up")
            host.ip("link", "set", "lo", "up")
        yield _Network(bridge, hosts)


def enter_network(namespace: str) -> None:
    """Move this process, which has one thread, into the network namespace at this path. Raises OSError."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(fd)


def _serve_inside(namespace: str, backend: str | None, connection: Connection) -> None:
    enter_network(namespace)
    ranks.serve(backend, connection)


class _HostsPool(ranks.Pool):
    """Workers on several hosts; the store is rank 0's, as no other process is in reach of all of them."""

    def __init__(self, sizes: Sequence[int], backend: str):
        self._places = [host for host, size in enumerate(sizes) for _ in range(size)]
        self._end = contextlib.ExitStack()
        self._hosts = self._end.enter_context(_network(len(sizes))).hosts
        try:
            super().__init__(sum(sizes), backend)
        except BaseException:
            self._end.close()
            raise

    def _start(self, size: int, backend: str | None) -> list[Worker]:
        overrides = {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "eth0", "TORCHELASTIC_USE_AGENT_STORE": None}
        return [
            ranks.start_rank(rank, size, 29500, functools.partial(_serve_inside, host.path, backend), overrides)
            for rank, host in enumerate(self._hosts[place] for place in self._places)
        ]

    def close(self) -> None:
        super().close()
        self._end.close()

    def kill(self) -> None:
        super().kill()
        self._end.close()


@functools.cache
def why_not() -> str:
    """Why hosts cannot be made on this machine; empty where they can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"hosts are network namespaces, and there is no {', no '.join(missing)}"
    try:
        with _network(2):
            return ""
    except OSError as error:
        return f"network namespaces cannot be made here: {error}"


class Hosts:
    """`sizes[h]` ranks on host h. They are started with the first call, and again after one that failed."""

    def __init__(self, sizes: Sequence[int], backend: str = "torchtp"):
        self.sizes, self._backend = tuple(sizes), backend
        self._pool: _HostsPool | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """As torchtp.testing.run_ranks; raises OSError where namespaces cannot be made."""
        if self._pool is None:
            self._pool = _HostsPool(self.sizes, self._backend)
        pool, self._pool = self._pool, None
        try:
            results, spoiled = pool.call(fn, args, timeout * ranks.timeout_scale())
        except BaseException:
            pool.kill()
            raise
        if spoiled:
            pool.close()
        else:
            self._pool = pool
        return results

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
