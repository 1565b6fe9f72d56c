"""Times on the device: events, medians, and inputs that the cache does not still hold."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MOST_SETS = 16
_ENOUGH_SECONDS = 0.25  # of measuring one thing


def num_sets(num_bytes: int, device: torch.device) -> int:
    """How many inputs of `num_bytes` each to take in turn, so that together they are several times the cache."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MOST_SETS, max(2, math.ceil(4 * cache / max(num_bytes, 1))))


def seconds(runs: Sequence[Callable[[], Any]], device: torch.device, repeat: int = 30) -> float:
    """Median seconds of a call of `runs`, taken in turn; the device's own time where it is one.

    Slow calls are repeated less often, but at least five times.
    """
    if device.type != "cuda":
        return _host_seconds(runs, 1)
    for turn in range(max(3, len(runs))):
        if turn == 2:
            torch.cuda.synchronize()
            began = time.perf_counter()
        runs[turn % len(runs)]()
        if turn == 2:
            torch.cuda.synchronize()
            repeat = max(5, min(repeat, int(_ENOUGH_SECONDS / max(time.perf_counter() - began, 1e-6))))
    torch.cuda.synchronize()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for turn, (begin, end) in enumerate(marks):
        begin.record()
        runs[turn % len(runs)]()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def launch_seconds(run: Callable[[], Any], device: torch.device, calls: int = 50) -> float:
    """Seconds a call in a replayed graph of `calls` of them: what a short kernel takes without the host's own time."""
    if device.type != "cuda":
        return _host_seconds([run], 3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return seconds([graph.replay], device, repeat=10) / calls


def _host_seconds(runs: Sequence[Callable[[], Any]], repeat: int) -> float:
    taken = []
    for turn in range(repeat):
        began = time.perf_counter()
        runs[turn % len(runs)]()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
