"""Where ranks part: the traces of several ranks side by side (`torchtp trace`). Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What ranks must agree on. Of these a rank may see its own share only.
AGREED = ("op", "reduce_op", "dtype", "elements", "root")
UNEVEN = ("gather", "scatter", "alltoall")


@dataclass
class RankTrace:
    """What one rank wrote down of one process group."""

    rank: int
    global_rank: int
    now_ns: int
    reason: str
    error: str
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by sequence number

    @property
    def last(self) -> int:
        """The sequence number of its last call, -1 when it has made none."""
        return max(self.calls, default=-1)


@dataclass
class Parting:
    """One process group: the first call on which its ranks are not at one, if there is one."""

    group: str
    size: int
    ranks: dict[int, RankTrace]
    sequence: int | None  # of that call
    differs: bool  # ranks called different things; otherwise some have not called it, or not finished it

    @property
    def absent(self) -> list[int]:
        """Ranks of which there is no trace."""
        return [rank for rank in range(self.size) if rank not in self.ranks]


def read(paths: Iterable[str | Path]) -> list[Parting]:
    """The process groups in these files, in the order first met.

    Raises ValueError for a file that is no trace of torchtp, OSError for one that cannot be read.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, RankTrace]] = {}
    for path in paths:
        for key, trace in _read_one(Path(path)):
            groups.setdefault(key, {})[trace.rank] = trace
    return [_part(name, len(members), ranks) for (name, members), ranks in groups.items()]


def _read_one(path: Path) -> list[tuple[tuple[str, tuple[int, ...]], RankTrace]]:
    lines = path.read_text().splitlines()
    try:
        head, *rest = [json.loads(line) for line in lines]
        if head["torchtp_trace"] != 1:
            raise ValueError(f"it is of version {head['torchtp_trace']}")
        found: list[tuple[tuple[str, tuple[int, ...]], RankTrace]] = []
        for entry in rest:
            if "global_ranks" in entry:
                trace = RankTrace(entry["rank"], head["global_rank"], head["now_ns"], head["reason"], entry["error"])
                found.append(((entry["group"], tuple(entry["global_ranks"])), trace))
            else:
                found[-1][1].calls[entry["sequence"]] = entry
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of torchtp: {error}") from error
    return found


def _agreement(call: dict[str, Any]) -> tuple[Any, ...]:
    names = [name for name in AGREED if not (name == "elements" and call["op"] in UNEVEN)]
    return tuple(call[name] for name in names)


def _part(group: str, size: int, ranks: dict[int, RankTrace]) -> Parting:
    # What has left one rank's ring cannot be compared.
    first = max((min(trace.calls, default=0) for trace in ranks.values()), default=0)
    last = max((trace.last for trace in ranks.values()), default=-1)
    for sequence in range(first, last + 1):
        calls = [trace.calls.get(sequence) for trace in ranks.values()]
        if len({_agreement(call) for call in calls if call}) > 1:
            return Parting(group, size, ranks, sequence, True)
        if not all(call and call["state"] == "done" for call in calls):
            return Parting(group, size, ranks, sequence, False)
    return Parting(group, size, ranks, None, False)


def told(parting: Parting) -> str:
    """A few lines for people: the group, the call on which its ranks part, and what each rank did there."""
    return "\n".join(_lines(parting))


def _lines(parting: Parting) -> Iterator[str]:
    ranks = parting.ranks
    compared = min((trace.last for trace in ranks.values()), default=-1) + 1
    yield f"group {parting.group!r}, {parting.size} ranks"
    if parting.absent:
        yield f"  no trace of {_rank_list(parting.absent)}: pass their files too, or they were killed"
    if parting.sequence is None:
        yield f"  all agree: {compared} calls, the last on every rank is done"
        return
    number = parting.sequence
    yield f"  they part at call #{number}: " + (
        "they do not call the same" if parting.differs else "not every rank has come through it"
    )
    told_of: dict[str, list[int]] = {}
    for rank, trace in sorted(ranks.items()):
        told_of.setdefault(_state(trace, number), []).append(rank)
    for what, who in told_of.items():
        yield f"  {_rank_list(who)}: {what}"
    for trace in sorted(ranks.values(), key=lambda trace: trace.rank):
        if trace.error:
            yield f"  the first error on rank {trace.rank}: {trace.error.splitlines()[0]}"
            break


def _state(trace: RankTrace, number: int) -> str:
    call = trace.calls.get(number)
    if call is None:
        before = trace.calls.get(trace.last)
        if before is None:
            return "has called nothing"
        return f"has not called it; the last was #{trace.last} {describe(before)}, {before['state']}"
    since = ""
    if call["state"] in ("queued", "running"):
        begun = call["started_ns"] if call["state"] == "running" else call["called_ns"]
        since = f" for {(trace.now_ns - begun) * 1e-9:.1f} s"
    return f"{describe(call)}, {call['state']}{since}"


def describe(call: dict[str, Any]) -> str:
    """A call in words: "allreduce(SUM, Float, 25 elements)"."""
    parts = [call["reduce_op"], call["dtype"] if call["elements"] else "", f"{call['elements']:,} elements"]
    if call["root"] >= 0:
        parts.append(f"root {call['root']}")
    inside = ", ".join(part for part in parts if part) if call["op"] != "barrier" else ""
    return f"{call['op']}({inside})"


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
