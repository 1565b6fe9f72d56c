"""Where ranks part: the traces of several ranks side by side (`torchtp trace`). Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtp.observe import recorded, unmatched
from torchtp.observe.recorded import RankTrace

# What ranks must agree on. Of these a rank may see its own share only.
AGREED = ("op", "reduce_op", "dtype", "elements", "root")
UNEVEN = ("gather", "scatter", "alltoall")


@dataclass
class Parting:
    """One process group: the first call and the first exchange of halos on which its ranks are not at one, if any."""

    group: str
    members: tuple[int, ...]  # the global ranks, by which all are told: so are files named
    ranks: dict[int, RankTrace]  # by rank in the group
    sequence: int | None  # of that call
    differs: bool  # ranks called different things; otherwise some have not called it, or not finished it
    halo: int | None  # the sequence number of an exchange that some have not come through
    unmatched: list[str]  # messages that found no partner, a line each
    absent: list[int]  # global ranks of which there is no file
    outside: list[int]  # global ranks of which there is a file, without this group

    @property
    def is_found(self) -> bool:
        """Whether the ranks part anywhere."""
        return self.sequence is not None or self.halo is not None or bool(self.unmatched)

    @property
    def size(self) -> int:
        """Of the group."""
        return len(self.members)


def read(paths: Iterable[str | Path]) -> list[Parting]:
    """The process groups in these files, in the order first met.

    Raises ValueError for a file that is no trace of torchtp, OSError for one that cannot be read.
    """
    groups = recorded.read(paths)
    given = {trace.global_rank for ranks in groups.values() for trace in ranks.values()}
    return [_part(name, members, ranks, given) for (name, members), ranks in groups.items()]


def _agreement(call: dict[str, Any]) -> tuple[Any, ...]:
    names = [name for name in AGREED if not (name == "elements" and call["op"] in UNEVEN)]
    return tuple(call[name] for name in names)


def _part(group: str, members: tuple[int, ...], ranks: dict[int, RankTrace], given: set[int]) -> Parting:
    sequence, differs = _first([trace.calls for trace in ranks.values()], _agreement)
    # Each rank sees its own share of an exchange.
    halo, _ = _first([trace.halos for trace in ranks.values()], lambda call: (call["op"],))
    absent = [rank for rank in members if rank not in given]
    outside = [member for rank, member in enumerate(members) if rank not in ranks and member in given]
    return Parting(group, members, ranks, sequence, differs, halo, unmatched.of(ranks, members), absent, outside)


def _first(
    ranks: Sequence[dict[int, dict[str, Any]]], agreement: Callable[[dict[str, Any]], tuple[Any, ...]]
) -> tuple[int | None, bool]:
    """The first number on which ranks are not at one, and whether they differ there."""
    # What has left one rank's ring cannot be compared.
    first = max((min(calls, default=0) for calls in ranks), default=0)
    last = max((max(calls, default=-1) for calls in ranks), default=-1)
    for sequence in range(first, last + 1):
        calls = [of_rank.get(sequence) for of_rank in ranks]
        if len({agreement(call) for call in calls if call}) > 1:
            return sequence, True
        if not all(call and call["state"] == "done" for call in calls):
            return sequence, False
    return None, False


def told(parting: Parting) -> str:
    """A few lines for people: the group, the call on which its ranks part, and what each rank did there."""
    return "\n".join(_lines(parting))


def _lines(parting: Parting) -> Iterator[str]:
    ranks = parting.ranks
    compared = min((trace.last for trace in ranks.values()), default=-1) + 1
    whole = parting.members == tuple(range(parting.size))
    yield f"group {parting.group!r}, {parting.size} ranks" + ("" if whole else f": {_rank_list(parting.members)}")
    if parting.absent:
        yield (
            f"  no trace of {_rank_list(parting.absent)}: pass their files too (PATH.rank{parting.absent[0]}.jsonl), or they "
            "were killed"
        )
    if parting.outside:
        yield f"  not in the file of {_rank_list(parting.outside)}: the group was left there, or not yet made"
    if not parting.is_found:
        known = [parting.members[rank] for rank in sorted(parting.ranks)]
        if len(known) == 1 < parting.size:
            yield f"  {_rank_list(known)}: {compared} calls, the last is done; there is no other rank to compare with"
        elif len(known) < parting.size:
            yield f"  {_rank_list(known)} agree: {compared} calls, the last on each is done"
        else:
            yield f"  all agree: {compared} calls, the last on every rank is done"
        return
    if parting.sequence is not None:
        yield f"  they part at call #{parting.sequence}: " + (
            "they do not call the same" if parting.differs else "not every rank has come through it"
        )
        yield from _states(parting, parting.sequence, "calls")
    if parting.halo is not None:
        yield f"  they part at exchange of halos #{parting.halo}: not every rank has come through it"
        yield from _states(parting, parting.halo, "halos")
    if parting.unmatched:
        yield "  messages without a partner:"
        yield from (f"  {line}" for line in parting.unmatched)
    for trace in sorted(ranks.values(), key=lambda trace: trace.rank):
        if trace.error:
            yield f"  the first error on rank {trace.global_rank}: {trace.error.splitlines()[0]}"
            break


def _states(parting: Parting, number: int, kind: str) -> Iterator[str]:
    told_of: dict[str, list[int]] = {}
    for rank, trace in sorted(parting.ranks.items()):
        state = _state(trace, getattr(trace, kind), number, parting.members)
        told_of.setdefault(state, []).append(parting.members[rank])
    for what, who in told_of.items():
        yield f"  {_rank_list(who)}: {what}"


def _state(trace: RankTrace, calls: dict[int, dict[str, Any]], number: int, members: tuple[int, ...]) -> str:
    call = calls.get(number)
    if call is None:
        last = max(calls, default=-1)
        if last < 0:
            return "has called nothing"
        return f"has not called it; the last was #{last} {describe(calls[last], members)}, {calls[last]['state']}"
    since = ""
    if call["state"] in ("queued", "running"):
        begun = call["started_ns"] if call["state"] == "running" else call["called_ns"]
        since = f" for {(trace.now_ns - begun) * 1e-9:.1f} s"
    return f"{describe(call, members)}, {call['state']}{since}"


def describe(call: dict[str, Any], members: tuple[int, ...]) -> str:
    """A call in words: "allreduce(SUM, Float, 25 elements)", "halo(1,024 bytes)"; `members` are the group's global ranks."""
    if call["op"] == "halo":
        return f"halo({call['bytes']:,} bytes)"
    parts = [call["reduce_op"], call["dtype"] if call["elements"] else "", f"{call['elements']:,} elements"]
    if call["root"] >= 0:
        parts.append(f"root {members[call['root']]}")
    inside = ", ".join(part for part in parts if part) if call["op"] != "barrier" else ""
    return f"{call['op']}({inside})"


def _rank_list(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
