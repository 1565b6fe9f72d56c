"""What this machine does: calls of the backend beside gloo's, and training steps on a mesh beside one process (`torchtp bench`).

Each pair is measured in turn in the same processes. A figure is the median over repetitions of the time on the slowest rank.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import torchtp
from torchtp import named
from torchtp.host_memory import keep_freed_memory
from torchtp.planning.explaining import DIMS
from torchtp.tables import as_bytes, as_mesh, as_seconds, table

SIZES = (1 << 10, 64 << 10, 1 << 20, 25 << 20)
_WARMUP = 2


@dataclass(frozen=True)
class CallTime:
    """One collective call, or messages between neighbours, in seconds."""

    op: str
    num_bytes: int
    torchtp_s: float
    gloo_s: float


@dataclass(frozen=True)
class StepTime:
    """A training step on all images, in seconds: in one process that has all cores, and on the ranks of a mesh, which share them."""

    mesh: Mapping[str, int]
    one_process_s: float
    mesh_s: float
    # The largest one of a gradient, as a share of the largest gradient; None of several data ranks, whose batch norms take their
    # own images' statistics.
    difference: float | None


def calls(num_ranks: int, repeat: int = 20, sizes: Sequence[int] = SIZES) -> list[CallTime]:
    """Allreduce, allgather, alltoall and messages between neighbours, of fp32, between `num_ranks` processes of this machine.

    Raises ValueError for less than one rank or repetition.
    """
    _check_positive("num_ranks", num_ranks)
    _check_positive("repeat", repeat)
    per_rank = _on_ranks(_time_calls, num_ranks, repeat, tuple(sizes))
    return [CallTime(op, size, *map(_slowest, zip(*each, strict=True))) for (op, size), each in _by_key(per_rank)]


def steps(
    network: str,
    shapes: Sequence[Sequence[int]],
    mesh: Mapping[str, int],
    *,
    arguments: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    repeat: int = 5,
) -> StepTime:
    """Training steps of what "package.module:callable" makes of the arguments, on random images of these shapes a data rank.

    Raises ValueError if there is no such network, or it does not take them, for an axis that is none, and for less than one
    rank or repetition.
    """
    for axis, size in mesh.items():
        if axis not in DIMS and axis != "data":
            raise ValueError(f"the mesh has an axis {axis!r}: give sizes of h, w, d (they cut H, W, D) and data")
        _check_positive(f"the size of axis {axis!r}", size)
    _check_positive("repeat", repeat)
    named.made(network, arguments or {})  # which may be a ValueError: here, not on all ranks
    work = (network, dict(arguments or {}), [tuple(shape) for shape in shapes], dict(mesh), dtype, repeat)
    per_rank = _on_ranks(_time_steps, math.prod(mesh.values()), *work)
    one, several, difference = zip(*per_rank, strict=True)
    return StepTime(dict(mesh), _slowest(one), _slowest(several), max(difference) if mesh.get("data", 1) == 1 else None)


def table_of_calls(measured: Sequence[CallTime]) -> str:
    """Calls of the backend beside gloo's."""
    head = ("op", "bytes a rank", "torchtp", "gloo", "gloo : torchtp")
    rows = [
        (
            each.op,
            as_bytes(each.num_bytes),
            as_seconds(each.torchtp_s),
            as_seconds(each.gloo_s),
            f"{each.gloo_s / each.torchtp_s:.1f}",
        )
        for each in measured
    ]
    return "\n".join(table(head, rows))


def table_of_steps(measured: Sequence[StepTime]) -> str:
    """Training steps on meshes beside one process."""
    head = ("mesh", "ranks", "one process", "on the mesh", "times as fast", "gradients differ by")
    rows = [
        (
            as_mesh(each.mesh),
            str(math.prod(each.mesh.values())),
            as_seconds(each.one_process_s),
            as_seconds(each.mesh_s),
            f"{each.one_process_s / each.mesh_s:.2f}",
            "" if each.difference is None else f"{each.difference:.0e}",
        )
        for each in measured
    ]
    lines = [*table(head, rows)]
    if any(each.difference is None for each in measured):
        lines.append(
            "Gradients of several data ranks are not compared: norms take the statistics of each one's own images."
        )
    return "\n".join(lines)


def _check_positive(what: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{what} is at least 1, but it is {number}")


def _slowest(per_rank: Sequence[Sequence[float]]) -> float:
    return statistics.median(map(max, zip(*per_rank, strict=True)))


def _by_key(per_rank: Sequence[dict[Any, Any]]) -> list[tuple[Any, list[Any]]]:
    return [(key, [result[key] for result in per_rank]) for key in per_rank[0]]


def _on_ranks(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """What `fn` returns on each of so many processes of one group; ValueError with what the first of them raised."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(_rank, (fn, size, args, folder), nprocs=size, start_method="spawn")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise ValueError(f"rank {error.error_index}: {str(error).strip().splitlines()[-1]}") from error
        results = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]
    failures = [(rank, result) for rank, result in enumerate(results) if isinstance(result, _Failure)]
    if failures:
        rank, failure = min(failures, key=lambda one: one[1].follows)
        raise ValueError(f"rank {rank}: {failure.text}")
    return results


@dataclass(frozen=True)
class _Failure:
    text: str
    follows: bool  # another rank's


def _rank(rank: int, fn: Callable[..., Any], size: int, args: tuple[Any, ...], folder: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # newer names of collectives, which the oldest torch does not know
    torch.set_num_threads(max(1, _num_cores() // size))
    keep_freed_memory()
    dist.init_process_group("torchtp", rank=rank, world_size=size, store=dist.FileStore(f"{folder}/store", size))
    try:
        result = fn(*args)
        dist.barrier()
    except Exception as error:
        result = _Failure(f"{type(error).__name__}: {error}", isinstance(error, dist.DistError))
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _timed(run: Callable[[], Any], times: int = 1) -> float:
    """Seconds a call, all ranks having come."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def _time_calls(repeat: int, sizes: Sequence[int]) -> dict[tuple[str, int], tuple[list[float], list[float]]]:
    """Seconds on this rank of each op and size, with torchtp and with gloo."""
    gloo, world = dist.new_group(backend="gloo"), dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    beside = [other for other in (rank - 1, rank + 1) if 0 <= other < size]

    def neighbours(group: Any, tensor: Tensor) -> None:
        arrived = [torch.empty_like(tensor) for _ in beside]
        ops = [dist.P2POp(dist.isend, tensor, other, group) for other in beside]
        ops += [dist.P2POp(dist.irecv, into, other, group) for other, into in zip(beside, arrived, strict=True)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()

    def run(op: str, group: Any, tensor: Tensor) -> Any:
        if op == "allreduce":
            return dist.all_reduce(tensor, group=group)
        if op == "allgather":
            return dist.all_gather_into_tensor(tensor.new_empty(size * tensor.numel()), tensor, group=group)
        if op == "alltoall":
            whole = tensor[: tensor.numel() // size * size]
            return dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
        return neighbours(group, tensor)

    found = {}
    for op in ("allreduce", "allgather", "alltoall", *(["neighbours"] if beside else [])):
        for num_bytes in sizes:
            tensor = torch.zeros(num_bytes // 4)
            times = max(1, min(20, (1 << 20) // num_bytes))
            mine: tuple[list[float], list[float]] = ([], [])
            for turn in range(_WARMUP + repeat):
                for seconds, group in zip(mine, (world, gloo), strict=True):
                    one = _timed(lambda: run(op, group, tensor), times)  # noqa: B023
                    if turn >= _WARMUP:
                        seconds.append(one)
            found[op, num_bytes] = mine
    return found


class _Step:
    """Forward, the mean square of all that comes out as loss, backward."""

    def __init__(self, network: nn.Module, images: Sequence[Tensor]):
        self.network, self.images = network, images

    def __call__(self) -> None:
        self.network.zero_grad(set_to_none=True)
        outputs = [leaf for leaf in pytree.tree_leaves(self.network(*self.images)) if isinstance(leaf, Tensor)]
        loss = sum(leaf.square().mean() for leaf in outputs if leaf.is_floating_point())
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError("no output takes a gradient, so there is no backward to measure")
        loss.backward()


def _time_steps(
    network: str,
    arguments: dict[str, Any],
    shapes: list[tuple[int, ...]],
    axes: dict[str, int],
    dtype: Any,
    repeat: int,
) -> tuple[list[float], list[float], float]:
    """Seconds on this rank of steps in the first process alone, while the others sleep, and of steps on the mesh."""
    torch.manual_seed(0)
    cut = named.made(network, arguments).train()
    cut = cut if dtype is None else cut.to(dtype)
    kind = dtype or next((p.dtype for p in cut.parameters() if p.is_floating_point()), torch.float32)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    spatial = {name: DIMS[name] for name in axes if name in DIMS}
    layout = torchtp.Layout(mesh, spatial=spatial, data="data" if "data" in axes else None)
    every = [[torch.randn(shape, dtype=kind) for shape in shapes] for _ in range(layout.num_data)]
    whole = [torch.cat(images) for images in zip(*every, strict=True)]
    first = dist.get_rank() == 0
    plain = copy.deepcopy(cut) if first else None
    one = _Step(plain, whole) if plain is not None else lambda: None
    several = _Step(torchtp.parallelize(cut, layout), every[layout.data_rank])
    shared = torch.get_num_threads()
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(_WARMUP + repeat):
        torch.set_num_threads(_num_cores())
        alone = _timed(one)
        torch.set_num_threads(shared)
        both = _timed(several)
        if turn >= _WARMUP:
            seconds[0].append(alone)
            seconds[1].append(both)
    for step in (one, several):  # with the same random numbers
        torch.manual_seed(1)
        step()
    return *seconds, _difference(plain, cut) if plain is not None else 0.0


def _difference(plain: nn.Module, cut: nn.Module) -> float:
    pairs = [
        (mine.grad, theirs.grad)
        for mine, theirs in zip(plain.parameters(), cut.parameters(), strict=True)
        if mine.grad is not None and theirs.grad is not None
    ]
    largest = _largest([float(mine.abs().max()) for mine, _ in pairs])
    return _largest([float((mine - theirs).abs().max()) for mine, theirs in pairs]) / (largest or 1.0)


def _largest(values: Sequence[float]) -> float:
    """NaN if one is, which Python's max passes over; 0 of none."""
    return next(filter(math.isnan, values), max(values, default=0.0))
