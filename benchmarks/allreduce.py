"""An allreduce of fp32 sums by torchtp, gloo and Open MPI, turn and turn about.

    python -m benchmarks.allreduce

torchtp as Python calls it (`dist.all_reduce`) and as the floors without torch do it, each with the buffer anywhere and
in the shared segment; gloo from Python; Open MPI from C, where it is installed. Beside them the bound: one read of every
input and one write of every output, at the rate at which the same ranks copy buffers of this size at the same time.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks import teams
from benchmarks.common import Spread, parser, report

SIZES = [1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20]
RANKS = (2, 4)
# Where the system puts the processes' pages decides on large buffers by up to a half: so all are started anew as often.
CONTESTS = 4
# What a rank reads and writes, in parts of the larger of its two buffers, for `size` ranks.
MOVED: dict[str, Callable[[int], float]] = {
    "allreduce": lambda size: 2,
    "broadcast": lambda size: 1,
    "allgather": lambda size: 1 + 1 / size,
    "reduce_scatter": lambda size: 1 + 1 / size,
    "alltoall": lambda size: 2,
    "pair": lambda size: 2,
}


class Contest:
    """All teams of `size` ranks; `measure` has them time a collective one after the other."""

    def __init__(self, size: int, stack: ExitStack):
        self.size = size
        self.floors = stack.enter_context(teams.floors(size))
        self.python = stack.enter_context(teams.python(size))
        mpi = teams.open_mpi(size)
        self.mpi = stack.enter_context(mpi) if mpi else None

    def measure(self, op: str, num_bytes: int, repeat: int, places: tuple[str, ...]) -> dict[str, list[float]]:
        """Seconds of a call on the slowest rank, by kind; the i-th of all kinds were measured next to each other."""
        # Small calls many times: ranks that were woken on one core lose a slice of the scheduler before they part.
        inner = max(1, min(2000, (4 << 20) // num_bytes))
        runs: dict[str, Callable[[], float]] = {}
        for place in places:
            suffix = "" if place == "private" else "_segment"
            runs[f"native{suffix}"] = lambda place=place: self.floors.seconds(op, num_bytes, inner, place)  # type: ignore[misc]
            name = "torchtp" if place == "private" else "segment"
            runs[name] = lambda place=place: self.python.seconds(op, num_bytes, inner, place)  # type: ignore[misc]
            self.floors.check(op, num_bytes, place)
            self.python.check(op, num_bytes, place)
        # Few of gloo's, in its favour: on two cores each of 50 in a row takes longer than each of 5.
        runs["gloo"] = lambda: self.python.seconds(op, num_bytes, min(inner, 5), "gloo")
        self.python.check(op, num_bytes, "gloo")
        if self.mpi:
            mpi = self.mpi
            runs["mpi"] = lambda: mpi.seconds(op, num_bytes, inner)
        copies = MOVED[op](self.size) / 2
        runs["bound"] = lambda: copies * min(self.floors.seconds(way, num_bytes, inner) for way in ("copy", "stream"))
        seconds: dict[str, list[float]] = {kind: [] for kind in runs}
        for _ in range(repeat):
            for kind, run in runs.items():
                seconds[kind].append(run())
        return seconds


def ratios(seconds: dict[str, list[float]], kinds: tuple[str, ...], over: str) -> dict[str, Spread]:
    """How many times as long `over` takes, for each of the kinds that were measured."""
    return {
        f"{over}_over_{kind}": Spread.of([a / b for a, b in zip(seconds[over], seconds[kind], strict=True)])
        for kind in kinds
        if kind in seconds and over in seconds
    }


def contend(
    ranks: int,
    cases: list[tuple[str, int, tuple[str, ...]]],
    args: argparse.Namespace,
    afterwards: Callable[[Contest, int], None] = lambda contest, repeat: None,
) -> list[dict[str, Any]]:
    """The lines of the table for ops, sizes in bytes and places; `afterwards` is called with the last of the contests."""
    contests = 1 if args.quick else CONTESTS
    repeat = 3 if args.quick else -(-args.repeat // contests)
    seconds: list[dict[str, list[float]]] = [defaultdict(list) for _ in cases]
    for number in range(contests):
        with ExitStack() as stack:
            contest = Contest(ranks, stack)
            for (op, size, places), found in zip(cases, seconds, strict=True):
                for kind, values in contest.measure(op, size, repeat, places).items():
                    found[kind] += values
            if number == contests - 1:
                afterwards(contest, 3 if args.quick else args.repeat)
    return [as_row(op, ranks, size, found) for (op, size, _), found in zip(cases, seconds, strict=True)]


def as_row(op: str, ranks: int, num_bytes: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """One line of the table: spreads of the times, and of their ratios within one repetition."""
    row: dict[str, Any] = {"op": op, "ranks": ranks, "bytes": num_bytes}
    row |= {f"{kind}_s": Spread.of(values) for kind, values in seconds.items()}
    row |= ratios(seconds, ("torchtp", "segment"), "gloo") | ratios(seconds, ("native", "native_segment"), "mpi")
    for kind in ("native", "native_segment"):
        if kind in seconds:
            pairs = zip(seconds["bound"], seconds[kind], strict=True)
            row[f"{kind}_of_bound"] = Spread.of([bound / own for bound, own in pairs])
    return row


def _time(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: row[key].text(1e6) if key in row else "-"


def _ratio(key: str, digits: int = 1) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key].median:,.{digits}f}" if key in row else "-"


def _percent(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key].median:.0%}" if key in row else "-"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "op": lambda row: row["op"],
    "ranks": lambda row: str(row["ranks"]),
    "KiB": lambda row: f"{row['bytes'] / 1024:,.0f}",
    "torchtp in C++, us": _time("native_s"),
    "in the segment": _time("native_segment_s"),
    "from Python": _time("torchtp_s"),
    "in the segment ": _time("segment_s"),
    "gloo": _time("gloo_s"),
    "Open MPI": _time("mpi_s"),
    "gloo : Python": _ratio("gloo_over_torchtp"),
    "gloo : segment": _ratio("gloo_over_segment"),
    "MPI : C++": _ratio("mpi_over_native", 2),
    "MPI : segment": _ratio("mpi_over_native_segment", 2),
    "bound, us": _time("bound_s"),
    "of it C++": _percent("native_of_bound"),
    "segment": _percent("native_segment_of_bound"),
}


def crowding(rows: list[dict[str, Any]]) -> dict[str, str]:
    """How 4 ranks compare with 2 where they have to share cores."""
    if (os.cpu_count() or 1) >= 4:
        return {}
    by_place = {(row["ranks"], row["bytes"]): row["native_s"].median for row in rows}
    over = {f"{size >> 10:,} KiB": by_place[4, size] / by_place[2, size] for ranks, size in by_place if ranks == 4}
    return {"4 ranks : 2 ranks, C++": ", ".join(f"{size} {ratio:.2f}" for size, ratio in over.items())}


def main() -> None:
    args = parser(__doc__).parse_args()
    sizes = SIZES[:3] if args.quick else SIZES
    cases = [("allreduce", size, ("private", "segment")) for size in sizes]
    rows = [row for ranks in RANKS for row in contend(ranks, cases, args)]
    report("allreduce", rows, COLUMNS, args.out, crowding(rows))


if __name__ == "__main__":
    main()
