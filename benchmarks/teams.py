"""Ranks that wait for commands, so that one program can time torchtp, gloo and Open MPI turn and turn about.

A team is the ranks of one kind: Python processes (torchtp and gloo in the same ones), processes of the floors without
torch (`native/floors.cpp`), or of Open MPI (`native/open_mpi.c`). A rank sleeps in a read of its pipe until a command
comes, so that the teams that are not asked use no core. Commands and answers are described in `native/floors.cpp`.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import measure, run_ranks
from torchtp.flags import positive_int

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "benchmarks"
MOST_BYTES = 64 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PATIENCE = 300.0  # seconds for one answer


class Team:
    """Processes that time what they are asked to; use it in a `with`."""

    def __init__(self, size: int, command: Callable[[int, str], list[str]]):
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(size):
            for name in ("in", "out"):
                os.mkfifo(self._path(name, rank))
        # Open for both, so that neither side waits for the other to come or go.
        self._pipes = [
            tuple(os.open(self._path(name, rank), os.O_RDWR) for name in ("in", "out")) for rank in range(size)
        ]
        self._rest = [b""] * size
        self._process = subprocess.Popen(command(size, self._folder.name), cwd=ROOT, start_new_session=True)
        self.greeting = [self._answer(rank) for rank in range(size)]

    def _path(self, name: str, rank: int) -> str:
        return f"{self._folder.name}/{name}{rank}"

    def ask(self, command: str) -> list[str]:
        """What every rank answers."""
        for writer, _ in self._pipes:
            os.write(writer, f"{command}\n".encode())
        return [self._answer(rank) for rank in range(self.size)]

    def seconds(self, op: str, num_bytes: int, inner: int, place: str = "private", dtype: str = "fp32") -> float:
        """Seconds of a call on the slowest rank, the mean of `inner` calls."""
        return max(map(float, self.ask(f"{op} {place} {dtype} {num_bytes} {inner}")))

    def check(self, op: str, num_bytes: int, place: str = "private") -> None:
        """Raises AssertionError when a rank gets a wrong result."""
        if set(self.ask(f"{op} {place} fp32 {num_bytes} 0")) != {"right"}:
            raise AssertionError(f"wrong {op} of {num_bytes} bytes, {self.size} ranks, buffer {place}")

    def _answer(self, rank: int) -> str:
        reader = self._pipes[rank][1]
        deadline = time.monotonic() + PATIENCE
        while b"\n" not in self._rest[rank]:
            if not select.select([reader], [], [], 0.2)[0]:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"rank {rank} of {self._process.args!r} does not answer")
                continue
            self._rest[rank] += os.read(reader, 4096)
        line, self._rest[rank] = self._rest[rank].split(b"\n", 1)
        return line.decode()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for writer, _ in self._pipes:
                    os.write(writer, b"end\n")
                self._process.wait(timeout=30)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            for pipes in self._pipes:
                for pipe in pipes:
                    os.close(pipe)
            self._folder.cleanup()


def _build(program: str) -> Path:
    include = Path(torch.__file__).parent / "include"
    subprocess.run(
        ["make", "-s", "-C", Path(__file__).parent / "native", f"BUILD={BUILD}", f"TORCH_INCLUDE={include}", BUILD / program],
        check=True,
    )  # fmt: skip
    return BUILD / program


def floors(size: int) -> Team:
    """The floors without torch; compiled when their sources have changed."""
    program = _build("floors")
    return Team(size, lambda size, folder: [str(program), str(size), folder])


def open_mpi(size: int) -> Team | None:
    """Open MPI, or nothing where mpicc or mpirun is missing."""
    if shutil.which("mpicc") is None or shutil.which("mpirun") is None:
        print("Open MPI is not compared: there is no mpicc and mpirun (Debian: libopenmpi-dev openmpi-bin)")
        return None
    program = _build("open_mpi")
    flags = ["--oversubscribe", "--bind-to", "none"] + (["--allow-run-as-root"] if os.geteuid() == 0 else [])
    return Team(size, lambda size, folder: ["mpirun", *flags, "-np", str(size), str(program), folder])


def python(size: int) -> Team:
    """torch.distributed: PLACE is private, segment or gloo (private memory, gloo's group)."""
    return Team(size, lambda size, folder: [sys.executable, "-m", "benchmarks.teams", str(size), folder])


class _Calls:
    """The collectives of this rank over torch.distributed."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.groups = {"gloo": dist.new_group(backend="gloo")}
        own = dist.group.WORLD
        assert own is not None
        self.groups |= {"private": own, "segment": own}
        backend = own._get_backend(torch.device("cpu"))
        shared = [backend.allocate_tensor(MOST_BYTES, dtype=torch.uint8, device=torch.device("cpu")) for _ in range(2)]
        private = [torch.zeros(MOST_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.buffers = {"gloo": private, "private": private, "segment": shared}

    def tensors(self, op: str, place: str, dtype: str, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output; the larger of the two has `num_bytes`, and both are the same for ops in place."""
        part = num_bytes // self.size
        sizes = {"allgather": (part, num_bytes), "reduce_scatter": (num_bytes, part)}.get(op, (num_bytes, num_bytes))
        source, result = (
            buffer[:length].view(DTYPES[dtype]) for buffer, length in zip(self.buffers[place], sizes, strict=True)
        )
        return source, source if op in ("allreduce", "broadcast") else result

    def call(self, op: str, place: str, source: torch.Tensor, result: torch.Tensor) -> Callable[[], Any]:
        """What runs the op once."""
        group = self.groups[place]
        if op == "allreduce":
            return functools.partial(dist.all_reduce, source, group=group)
        if op == "broadcast":
            return _Broadcast(source, self.size, group)
        if op == "pair":
            return functools.partial(_swap, source, result, self.rank ^ 1, group)
        ops: dict[str, Callable[..., Any]] = {
            "allgather": _newest("all_gather_single", "all_gather_into_tensor"),
            "reduce_scatter": _newest("reduce_scatter_single", "reduce_scatter_tensor"),
            "alltoall": dist.all_to_all_single,
        }
        return functools.partial(ops[op], result, source, group=group)

    def check(self, op: str, place: str, source: torch.Tensor, result: torch.Tensor) -> str:
        source.fill_(self.rank + 1)
        call = self.call(op, place, source, result)
        call()
        parts = torch.arange(1, self.size + 1, dtype=result.dtype)
        if op in ("allgather", "alltoall"):
            wanted = parts.repeat_interleave(result.numel() // self.size)
        else:
            value = {"broadcast": 2, "pair": (self.rank ^ 1) + 1}.get(op, sum(range(1, self.size + 1)))
            wanted = torch.full_like(result, value)
        right = result.equal(wanted)
        source.zero_()
        return "right" if right else "wrong"


def _newest(*names: str) -> Any:
    """The first of these that this torch has: later ones warn there."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


class _Broadcast:
    """Broadcasts from every rank in turn, so that no root runs ahead of the others."""

    def __init__(self, tensor: torch.Tensor, size: int, group: dist.ProcessGroup):
        self.tensor, self.size, self.group, self.turn = tensor, size, group, 0

    def __call__(self) -> None:
        self.turn += 1
        dist.broadcast(self.tensor, self.turn % self.size, self.group)


def _swap(source: torch.Tensor, result: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
    ops = [dist.P2POp(dist.isend, source, peer, group), dist.P2POp(dist.irecv, result, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _serve(folder: str) -> None:
    """Obeys until it is told to end."""
    calls = _Calls()
    used = 0.0
    with open(f"{folder}/in{calls.rank}") as commands, open(f"{folder}/out{calls.rank}", "w") as answers:
        print("ready", file=answers, flush=True)
        for line in commands:
            words = line.split()
            if words[0] == "end":
                break
            if words[0] == "idle":
                usage = resource.getrusage(resource.RUSAGE_SELF)
                before, used = used, usage.ru_utime + usage.ru_stime
                print(used - before, file=answers, flush=True)
                continue
            op, place, dtype, num_bytes, inner = words[0], words[1], words[2], int(words[3]), int(words[4])
            source, result = calls.tensors(op, place, dtype, num_bytes)
            if inner == 0:
                answer = calls.check(op, place, source, result)
            else:
                call = calls.call(op, place, source, result)
                answer = f"{measure(call, 1, 5 if num_bytes < 1 << 20 else 1, inner)[0]:.9e}"
            print(answer, file=answers, flush=True)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("size", type=positive_int, help="number of ranks")
    flags.add_argument("folder", help="where the ranks' pipes in<rank> and out<rank> are, which a Team makes")
    args = flags.parse_args()
    run_ranks(_serve, args.size, args.folder)


if __name__ == "__main__":
    main()
