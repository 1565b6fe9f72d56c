"""What the ranks of a job did when, as one picture: their traces as a timeline for a browser (`torchtp timeline`). Needs no torch.

The format is that of chrome://tracing and https://ui.perfetto.dev: a row for each rank, in it one for each process group's collectives, in which what was
waited for another rank is marked, and below them its messages and exchanges of halos.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchtp.observe import recorded
from torchtp.observe.parting import describe
from torchtp.observe.recorded import Group, RankTrace

Event = dict[str, Any]

# Which no rank leaves before the last one has come, and all leave together.
_MEETING = ("allreduce", "barrier", "allgather", "alltoall")
_UNFINISHED = ("queued", "running")


def read(paths: Iterable[str | Path]) -> dict[str, Any]:
    """The timeline of the calls in these files, to be written as JSON; times in it are microseconds from the first call on.

    Ranks of other hosts have other clocks: they are set by the calls that they have in common.
    Raises ValueError for a file that is no trace of torchtp, OSError for one that cannot be read.
    """
    groups = recorded.read(paths)
    offsets = _offsets(groups)
    origin = min(
        (
            call["called_ns"] + offsets[trace.global_rank]
            for ranks in groups.values()
            for trace in ranks.values()
            for _, call in _entries(trace)
        ),
        default=0,
    )
    events: list[Event] = []
    for rank in sorted(offsets):
        events += [_named("process_name", rank, 0, f"rank {rank}"), _named("process_sort_index", rank, 0, rank)]
    for place, (group, ranks) in enumerate(groups.items()):
        for trace in ranks.values():
            events += _of_rank(group, trace, place * len(_ROWS), offsets[trace.global_rank] - origin)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def told(timeline: dict[str, Any]) -> str:
    """What a timeline shows, in a line for people: "2 ranks, 40 calls in 3.2 s"."""
    events = [event for event in timeline["traceEvents"] if event["ph"] in "Xbe"]
    calls = [event for event in events if "call" in event.get("args", {})]
    ranks = len({event["pid"] for event in timeline["traceEvents"]})
    last = max((event["ts"] + event.get("dur", 0) for event in events), default=0)
    return f"{ranks} ranks, {len(calls):,} calls in {last * 1e-6:.3g} s"


_ROWS = {"calls": "", "halos": ", halos", "messages": ", messages"}


def _entries(trace: RankTrace) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in _ROWS:
        entries = getattr(trace, kind)
        for call in entries.values() if isinstance(entries, dict) else entries:
            yield kind, call


def _named(kind: str, rank: int, row: int, value: Any) -> Event:
    return {
        "ph": "M",
        "name": kind,
        "pid": rank,
        "tid": row,
        "args": {"sort_index" if "sort" in kind else "name": value},
    }


def _of_rank(group: Group, trace: RankTrace, first_row: int, shift: int) -> Iterator[Event]:
    """What one rank did in one group; `shift` (ns) is added to its clock."""
    name, members = group
    pid = trace.global_rank
    rows = {kind: first_row + place for place, kind in enumerate(_ROWS)}
    for kind in {kind for kind, _ in _entries(trace)}:
        yield _named("thread_name", pid, rows[kind], f"group {name!r}{_ROWS[kind]}")
        yield _named("thread_sort_index", pid, rows[kind], rows[kind])
    for number, (kind, call) in enumerate(_entries(trace)):
        begin = call["started_ns"] if call["state"] != "queued" else call["called_ns"]
        end = trace.now_ns if call["state"] in _UNFINISHED else max(begin, call["ended_ns"])
        event = {"name": _title(call, members), "cat": kind, "pid": pid, "tid": rows[kind], "ts": (begin + shift) / 1e3}
        told = {
            "call": describe(call, members),
            "number": call.get("number", call["sequence"]),
            "bytes": call["bytes"],
            "queued_us": (begin - call["called_ns"]) / 1e3,
            "waited_us": call["waited_ns"] / 1e3,
            "state": call["state"],
        }
        if call["state"] not in ("done", *_UNFINISHED):
            event["cname"] = "terrible"
            told["error"] = trace.error
        if kind != "calls":  # several at a time
            key = {"id": f"{pid}.{rows[kind]}.{number}"}
            yield {**event, **key, "ph": "b", "args": told}
            yield {**event, **key, "ph": "e", "ts": (end + shift) / 1e3}
            continue
        yield {**event, "ph": "X", "dur": (end - begin) / 1e3, "args": told}
        last = call["last_rank"]
        if call["waited_ns"] and last >= 0:
            waited = min(call["waited_ns"], end - begin)
            of = members[last]
            yield {**event, "ph": "X", "name": f"waits for rank {of}", "dur": waited / 1e3, "args": {"rank": of}}


def _title(call: dict[str, Any], members: tuple[int, ...]) -> str:
    if "peer" not in call or not 0 <= call["peer"] < len(members):
        return str(call["op"])
    return f"{call['op']} {'to' if call['op'] == 'send' else 'from'} rank {members[call['peer']]}"


def _offsets(groups: dict[Group, dict[int, RankTrace]]) -> dict[int, int]:
    """What is to be added to each rank's clock (ns), by global rank: 0 for those whose clock agrees with the first rank's."""
    offsets: dict[int, int] = {}
    for ranks in sorted(groups.values(), key=len, reverse=True):
        traces = [ranks[rank] for rank in sorted(ranks)]
        known = next((trace for trace in traces if trace.global_rank in offsets), traces[0])
        base = offsets.get(known.global_rank, 0)
        for trace in traces:
            apart = _apart(known, trace)
            if trace.global_rank not in offsets and apart is not None:  # else a smaller group may tell
                offsets |= {known.global_rank: base, trace.global_rank: base + apart}
    every = (trace.global_rank for ranks in groups.values() for trace in ranks.values())
    return dict.fromkeys(every, 0) | offsets


def _apart(reference: RankTrace, trace: RankTrace) -> int | None:
    """How far the clock of a rank is behind the reference's, by the calls that both have come through; None without any."""
    common = [
        (reference.calls[number], trace.calls[number])
        for number in reference.calls.keys() & trace.calls.keys()
        if reference.calls[number]["op"] in _MEETING
        and reference.calls[number]["state"] == trace.calls[number]["state"] == "done"
    ]
    if not common:
        return None
    if all(
        mine["ended_ns"] >= theirs["started_ns"] and theirs["ended_ns"] >= mine["started_ns"] for mine, theirs in common
    ):
        return 0
    return round(statistics.median(mine["ended_ns"] - theirs["ended_ns"] for mine, theirs in common))
