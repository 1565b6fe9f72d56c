"""Processes for ranks: forked off templates that have imported torch already, as that takes seconds of each."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import IO, Any, Protocol

from torchtp.testing.poison import poison_empty

_LOG_TAIL = 8000
# Ranks differ in what Python's seed of hashes and the places of libraries in memory decide, as they do under torchrun:
# neighbours come from different templates.
_NUM_TEMPLATES = 2
_MAX_ENVIRONMENTS = 2  # whose templates are kept: that of most calls, and that of a test which changes it
# What differs between workers, or between the calls of one program, and is read after the fork.
_OWN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "PYTEST_CURRENT_TEST")
_OWN_PREFIXES = ("LOCAL_", "TORCHELASTIC_")

Main = Callable[[Connection], None]


class _Process(Protocol):
    """As far as Worker uses it, subprocess.Popen."""

    def send_signal(self, number: int) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Worker:
    """One rank's process, the connection to it and the file its output and stack dumps go to."""

    def __init__(self, rank: int, environment: Mapping[str, str | None], main: Main):
        """It runs main(connection), which is pickled; `environment` changes ours, None removes."""
        everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        variables = {name: value for name, value in everything.items() if value is not None}
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        mine, theirs = socket.socketpair()
        with theirs:
            self.process: _Process = _template(rank % _NUM_TEMPLATES, variables).fork(
                theirs.fileno(), self.log.fileno(), (os.getcwd(), list(sys.path), variables, main)
            )
        self.connection = Connection(mine.detach())

    def log_tail(self) -> str:
        return _tail_of(self.log)

    def dump_stacks(self) -> str:
        """Have the process write the stack of each thread into its log and return the log's end."""
        before = self.log.seek(0, os.SEEK_END)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while self.log.seek(0, os.SEEK_END) == before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # the dump is written line by line; half of one is still worth printing
        return self.log_tail()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.log.close()


def _tail_of(log: IO[bytes]) -> str:
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - _LOG_TAIL))
    text = log.read().decode(errors="replace").strip()
    return f"\n--- output ---\n{text}" if text else ""


class _Forked:
    """A template's child. Only its template can learn how it ended, and until we ask its pid stays its own."""

    def __init__(self, template: _Template, pid: int):
        self._template, self._pid = template, pid
        self._fd = os.pidfd_open(pid)  # until we know how it ended
        self._status: int | None = None

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1e3):
                raise subprocess.TimeoutExpired(f"pid {self._pid}", timeout or 0.0)
            os.close(self._fd)
            self._status = self._template.status_of(self._pid)
        return self._status


class _Template:
    """A process that has imported torch and does nothing but fork."""

    def __init__(self, variables: Mapping[str, str]):
        self._lock = threading.Lock()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the template)
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        self._connection = Connection(mine.detach())
        weakref.finalize(self, _end, self._connection, self._process, self._log).atexit = False

    def fork(self, connection_fd: int, log_fd: int, task: tuple[Any, ...]) -> _Forked:
        return _Forked(self, self._ask("fork", task, connection_fd, log_fd))

    def status_of(self, pid: int) -> int:
        return self._ask("status", pid)

    def _ask(self, what: str, argument: Any, *fds: int) -> int:
        with self._lock:
            try:
                self._connection.send((what, argument))
                for fd in fds:
                    reduction.send_handle(self._connection, fd, self._process.pid)
                return int(self._connection.recv())
            except (EOFError, OSError) as error:
                _templates.clear()  # the next call starts new ones
                status = self._process.wait()
                raise RuntimeError(
                    f"the process that ranks are forked off ended with exit status {status}{_tail_of(self._log)}"
                ) from error


def _end(connection: Connection, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    connection.close()
    process.wait()
    log.close()


# By what they have read of the environment; each lives on while it has workers.
_templates: OrderedDict[frozenset[tuple[str, str]], list[_Template]] = OrderedDict()
atexit.register(_templates.clear)
os.register_at_fork(after_in_child=_templates.clear)  # two processes would speak over one connection


def _template(index: int, variables: Mapping[str, str]) -> _Template:
    """One that has imported torch among these variables: libraries read some of them then."""
    read = frozenset(
        (name, value)
        for name, value in variables.items()
        if name not in _OWN_VARIABLES and not name.startswith(_OWN_PREFIXES)
    )
    if read not in _templates:
        while len(_templates) >= _MAX_ENVIRONMENTS:
            _templates.popitem(last=False)
        _templates[read] = [_Template(dict(read)) for _ in range(_NUM_TEMPLATES)]  # they start side by side
    _templates.move_to_end(read)
    return _templates[read][index]


_MAIN = (
    "import sys; sys.path[:] = sys.argv[2:]; from torchtp.testing.workers import _fork_on_demand; "
    "_fork_on_demand(int(sys.argv[1]))"
)


def _fork_on_demand(fd: int) -> None:
    poison_empty()  # as every worker: that imports more of torch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all
    connection = Connection(fd)
    while True:
        try:
            what, argument = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # taking down all that torch has imported would take seconds, for which who started us waits
        if what == "status":
            connection.send(os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1]))
            continue
        theirs, log = (reduction.recv_handle(connection) for _ in range(2))
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become_worker(theirs, log, *argument)
        os.close(theirs)
        os.close(log)
        connection.send(pid)


def _become_worker(fd: int, log: int, folder: str, paths: list[str], variables: dict[str, str], main: Main) -> None:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:] = paths
        main(Connection(fd))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
