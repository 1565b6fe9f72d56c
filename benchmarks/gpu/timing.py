"""Times on the device itself: graphs of calls that are replayed, and inputs that the cache does not still hold."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")
_MOST_SETS = 16
_MOST_CALLS = 64  # of a graph
_LONG_SECONDS = 1.5e-3  # of a graph: beside it the gap before its first kernel is nothing
_ENOUGH_SECONDS = 0.01  # of measuring one thing
_LEAST_REPEATS, _MOST_REPEATS = 5, 30


def calls_of_graph(num_runs: int, seconds: float) -> int:
    """How many calls of `seconds` each stand in one graph: whole rounds of the runs, so that each counts alike."""
    rounds = math.ceil(_LONG_SECONDS / max(seconds * num_runs, 1e-9))
    return num_runs * max(1, min(rounds, _MOST_CALLS // num_runs))


class Timer:
    """Measures on one device, all of a part, on one stream of its own.

    Only a stream that is not the default one can be captured, and a backward runs on the stream of its forward.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._by_events: list[str] = []  # why calls could not be captured
        self._broken: list[torch.cuda.CUDAGraph] = []  # the allocator knows them for good

    @property
    def dry(self) -> bool:
        return self.device.type != "cuda"

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def row(self, measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        """What `measure(timer, *args)` found, and what had to be measured with the host's own time in it, if any."""
        self._by_events.clear()
        with contextlib.nullcontext() if self.dry else torch.cuda.stream(self._stream):
            found = measure(self, *args)
        return found | ({"by_events": list(self._by_events)} if self._by_events else {})

    def sets(self, make: Callable[[], Made], num_bytes: int) -> list[Made]:
        """Inputs of `num_bytes` each to take in turn, so many that together they are several times the cache."""
        if self.dry:
            return [make() for _ in range(2)]
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return [make() for _ in range(min(_MOST_SETS, max(2, math.ceil(4 * cache / max(num_bytes, 1)))))]

    def seconds(self, runs: Sequence[Callable[[], Any]]) -> float:
        """Median seconds of a call of `runs`, taken in turn: the device's own, without the host's between two calls."""
        if self.dry:
            return _host_seconds(runs)
        once = _warm_up(runs)
        calls = calls_of_graph(len(runs), once)
        try:
            replay = self._captured(runs, calls)
        except RuntimeError as error:
            self._by_events.append(str(error).partition("\n")[0])
            return statistics.median(_elapsed(runs, _repeats(once)))
        replay()  # the first one also brings the graph to the device
        return statistics.median(_elapsed([replay], _repeats(once * calls))) / calls

    def _captured(self, runs: Sequence[Callable[[], Any]], calls: int) -> Callable[[], None]:
        """Replays `calls` calls. What they return lives as long as the inputs do, in memory of its own, like these."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        returned: deque[Any] = deque(maxlen=len(runs))
        try:
            # Not torch.cuda.graph(), which empties the allocator's cache each time. The backward runs in autograd's
            # thread, which "thread_local" leaves alone.
            graph.capture_begin(capture_error_mode="thread_local")
            for call in range(calls):
                returned.append(runs[call % len(runs)]())
            graph.capture_end()
        except BaseException:
            self._give_up(graph)
            raise
        return graph.replay

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, and have the generator of random numbers count outside of graphs again."""
        self._broken.append(graph)
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        torch.cuda.synchronize()
        one = torch.zeros(1, device=self.device)
        whole = torch.cuda.CUDAGraph()
        whole.capture_begin(capture_error_mode="thread_local")
        one.add_(1)
        whole.capture_end()


def _warm_up(runs: Sequence[Callable[[], Any]]) -> float:
    """Every run once, and at least three calls, then the host's seconds of one: what is chosen or loaded on first use is."""
    for call in range(max(3, len(runs))):
        runs[call % len(runs)]()
    torch.cuda.synchronize()
    began = time.perf_counter()
    runs[0]()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _repeats(seconds: float) -> int:
    return max(_LEAST_REPEATS, min(_MOST_REPEATS, int(_ENOUGH_SECONDS / max(seconds, 1e-9))))


def _elapsed(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Seconds between events before and behind each of `repeats` calls."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for turn, (begin, end) in enumerate(marks):
        begin.record()
        runs[turn % len(runs)]()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def _host_seconds(runs: Sequence[Callable[[], Any]]) -> float:
    began = time.perf_counter()
    runs[0]()
    return time.perf_counter() - began
