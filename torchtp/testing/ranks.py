"""Runs a function on several ranks of this machine, on worker processes that are reused."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import functools
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from torchtp.testing.poison import poison_empty as poison_empty
from torchtp.testing.workers import Main, Worker

_MIN_WORKERS, _MAX_WORKERS = 8, 20  # idle pools are closed, oldest first, so that no more processes stay alive
_WORKER_BYTES = 1 << 30  # what a worker may grow to; how much of the machine's memory is left decides between the two
_START_SECONDS = 180.0  # importing torch on a busy machine; not part of a call's time limit
_GRACE_SECONDS = 3.0  # what the other ranks get to answer once one has failed
# A pool whose functions have left more process groups than this is replaced: each gloo group keeps threads running.
_MAX_GROUPS = 24


class RanksFailed(RuntimeError):
    """At least one rank raised or died; `failures` maps each such rank to its traceback or exit status."""

    def __init__(self, message: str, failures: dict[int, str]):
        super().__init__(message)
        self.failures = failures


def timeout_scale() -> float:
    """What time limits are multiplied by on a slow machine."""
    return float(os.environ.get("TORCHTP_TIMEOUT_SCALE", "1"))


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 60.0,
    fresh: bool = False,
) -> list[Any]:
    """Call `fn(*args)` on `size` ranks and return what each returned, in the order of ranks.

    `fn` is a function of an importable module (a test file will do); arguments and results are pickled. On every rank
    torch.distributed is initialised with `backend` (with None it is not, and `init_process_group("...")` in `fn` works
    as under torchrun), torch runs on one thread, seeded alike, and `torch.empty` gives NaN. Workers are reused by later
    calls of the same size and backend, unless `fresh` or `fn` touched the default process group.

    Raises RanksFailed with the tracebacks if a rank raised or died, and TimeoutError with the stacks of the ranks that
    had not returned after `timeout` seconds; the workers are gone in both cases. ValueError if `fn` can't be imported, as
    those of the started program (`__main__`), or an argument does not pickle; a result that does not is a RanksFailed.
    """
    pool = _pools.take(size, backend, fresh)
    try:
        results, spoiled = pool.call(fn, args, timeout * timeout_scale())
    except BaseException:
        pool.kill()
        raise
    if fresh or spoiled:
        pool.close()
    else:
        _pools.put_back(pool)
    return results


def start_rank(
    rank: int, size: int, port: int, main: Main, overrides: Mapping[str, str | None] | None = None
) -> Worker:
    """`main` is what it runs; `overrides` change its environment, None removes."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served by the parent, as torchrun's agent does
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    return Worker(rank, {**environment, **(overrides or {})}, main)


class Pool:
    """The workers of one (size, backend), and the store they meet at."""

    def __init__(self, size: int, backend: str | None):
        self.key = (size, backend)
        self.workers = self._start(size, backend)
        try:
            self._gather(_START_SECONDS, "start")
        except BaseException:
            self.kill()
            raise

    def _start(self, size: int, backend: str | None) -> list[Worker]:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return [start_rank(rank, size, self.store.port, functools.partial(serve, backend)) for rank in range(size)]

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> tuple[list[Any], bool]:
        name = getattr(fn, "__qualname__", repr(fn))
        if fn.__module__ == "__main__":
            raise ValueError(
                f"run_ranks needs a function of a module, which the ranks' processes import, and {name} is of the program "
                "that was started (__main__): put it into a file of its own and import it from there"
            )
        try:
            message = pickle.dumps((sys.path, pickle.dumps((fn, args))))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(f"run_ranks needs a function of a module and arguments that pickle: {error}") from error
        for worker in self.workers:
            with contextlib.suppress(OSError):  # a dead worker is reported by _gather, with its exit status
                worker.connection.send_bytes(message)
        answers = self._gather(timeout, name)
        return [value for value, _ in answers], any(spoiled for _, spoiled in answers)

    def _gather(self, timeout: float, name: str) -> list[tuple[Any, bool]]:
        answers: dict[int, tuple[Any, bool]] = {}
        failures: dict[int, str] = {}
        ranks: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(self.workers)}
        deadline = time.monotonic() + timeout
        while ranks:
            ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = ranks.pop(connection)
                worker = self.workers[rank]
                try:
                    ok, payload, spoiled = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    failures[rank] = f"died with exit status {worker.process.wait()}{worker.log_tail()}"
                else:
                    if ok:
                        answers[rank] = (payload, spoiled)
                    else:
                        failures[rank] = f"raised\n{payload}"
                if failures:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        missing = sorted(ranks.values())
        if failures:
            text = "\n".join(f"rank {rank} {failures[rank]}" for rank in sorted(failures))
            left = f"\nranks {missing} had not returned" if missing else ""
            raise RanksFailed(f"{name} on {len(self.workers)} ranks ({self.key[1]}):\n{text}{left}", failures)
        if missing:
            stacks = "\n".join(f"rank {rank}{self.workers[rank].dump_stacks()}" for rank in missing)
            raise TimeoutError(f"{name}: ranks {missing} of {len(self.workers)} not back in {timeout:g} s\n{stacks}")
        return [answers[rank] for rank in range(len(self.workers))]

    def close(self) -> None:
        """Let the workers go: they leave by themselves when the connection closes."""
        for worker in self.workers:
            worker.connection.close()
        for worker in self.workers:
            try:
                worker.process.wait(10.0)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.log.close()

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()


def _max_workers() -> int:
    try:
        with open("/proc/meminfo") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return _MIN_WORKERS
    return max(_MIN_WORKERS, min(_MAX_WORKERS, kilobytes * 1024 // _WORKER_BYTES))


class _Pools:
    """Idle pools by (size, backend)."""

    def __init__(self) -> None:
        self._idle: OrderedDict[tuple[int, str | None], Pool] = OrderedDict()

    def take(self, size: int, backend: str | None, fresh: bool) -> Pool:
        if not fresh and (size, backend) in self._idle:
            return self._idle.pop((size, backend))
        while self._idle and sum(key[0] for key in self._idle) + size > _max_workers():
            self._idle.popitem(last=False)[1].close()
        return Pool(size, backend)

    def put_back(self, pool: Pool) -> None:
        self._idle[pool.key] = pool

    def close(self) -> None:
        while self._idle:
            self._idle.popitem()[1].close()


_pools = _Pools()
atexit.register(_pools.close)


def serve(backend: str | None, connection: Connection) -> None:
    """A worker's life: initialise, then answer calls until the parent closes the connection."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def start() -> None:
        torch.set_num_threads(1)
        poison_empty()
        if backend:
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=300))

    _answer(connection, start)
    group = _default_group()

    def listen() -> None:
        # On its own thread: a rank stuck in a collective must also leave when the parent does.
        while True:
            try:
                calls.put(connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        paths, call = pickle.loads(calls.get())

        def work(paths: list[str] = paths, call: bytes = call) -> Any:
            sys.path[:] = paths
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            fn, args = pickle.loads(call)
            with warnings.catch_warnings():  # filters set by one test are not the next one's
                return fn(*args)

        _answer(connection, work, lambda: _default_group() is not group or _num_groups() > _MAX_GROUPS)


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map) if dist.is_available() else 0


def _default_group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _answer(connection: Connection, work: Callable[[], Any], is_spoiled: Callable[[], bool] = lambda: False) -> None:
    try:
        message = pickle.dumps((True, work(), is_spoiled()))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc(), True))
    connection.send_bytes(message)
