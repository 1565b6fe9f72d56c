"""The files that ranks write their last calls to (`torchtp.trace`), read. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Group = tuple[str, tuple[int, ...]]  # its name and the global ranks in it


@dataclass
class RankTrace:
    """What one rank wrote down of one process group."""

    rank: int
    global_rank: int
    now_ns: int
    reason: str
    error: str
    size: int
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by sequence number
    halos: dict[int, dict[str, Any]] = field(default_factory=dict)  # by sequence number, of their own
    messages: list[dict[str, Any]] = field(default_factory=list)  # oldest first

    @property
    def last(self) -> int:
        """The sequence number of its last call, -1 when it has made none."""
        return max(self.calls, default=-1)


def read(paths: Iterable[str | Path]) -> dict[Group, dict[int, RankTrace]]:
    """What each rank of each process group wrote down, in the order first met.

    Raises ValueError for a file that is no trace of torchtp, OSError for one that cannot be read.
    """
    groups: dict[Group, dict[int, RankTrace]] = {}
    for path in paths:
        for group, trace in _read_one(Path(path)):
            groups.setdefault(group, {})[trace.rank] = trace
    return groups


# What stands in each kind of line: whole numbers, texts, and of a call the ranks in its group (-1: none).
_HEAD = (("torchtp_trace", "global_rank", "now_ns"), ("reason",), ())
_GROUP = (("size",), ("group", "error"), ("rank",))
_CALL = (
    ("sequence", "elements", "bytes", "called_ns", "started_ns", "ended_ns", "waited_ns"),
    ("kind", "op", "reduce_op", "dtype", "state"),
    ("root", "last_rank"),
)
_MESSAGE = (("tag", "number", *_CALL[0]), _CALL[1], ("peer", *_CALL[2]))


def _checked(entry: Any, fields: tuple[tuple[str, ...], ...], size: int = 0) -> dict[str, Any]:
    """The line, in which all fields are there and are what they should be; `size` is the group's."""
    if not isinstance(entry, dict):
        raise ValueError(f"a line is an object, but it is of type {type(entry).__name__}")
    numbers, texts, ranks = fields
    for name in numbers + texts + ranks:
        if name not in entry:
            raise ValueError(f"it has no {name!r}")
    for name in numbers + ranks:
        if type(entry[name]) is not int or not -(2**63) <= entry[name] < 2**64:
            raise ValueError(f"{name!r} is a whole number of 64 bits, but it is {entry[name]!r:.40}")
    for name in texts:
        if not isinstance(entry[name], str):
            raise ValueError(f"{name!r} is a text, but it is {entry[name]!r:.40}")
        entry[name].encode()  # half a surrogate pair could not be printed
    for name in ranks:
        if not -1 <= entry[name] < size:
            raise ValueError(f"{name!r} is a rank of a group of {size}, but it is {entry[name]}")
    return entry


def _group_of(entry: dict[str, Any]) -> Group:
    members = entry["global_ranks"]
    if not isinstance(members, list) or any(type(member) is not int for member in members):
        raise ValueError("'global_ranks' is a list of ranks")
    _checked(entry, _GROUP, len(members))
    if len(members) != entry["size"] or entry["rank"] < 0:
        raise ValueError(f"rank {entry['rank']} of {entry['size']} does not fit {len(members)} 'global_ranks'")
    return entry["group"], tuple(members)


def _read_one(path: Path) -> list[tuple[Group, RankTrace]]:
    lines = path.read_bytes().splitlines()
    found: list[tuple[Group, RankTrace]] = []
    head: dict[str, Any] = {}
    number = 0
    try:
        if not any(map(bytes.strip, lines)):
            raise ValueError("it is empty")
        for line in lines:
            number += 1
            entry = json.loads(line.decode())
            if not head:
                head = _checked(entry, _HEAD)
                if head["torchtp_trace"] != 1:
                    raise ValueError(f"it is of version {head['torchtp_trace']}")
            elif isinstance(entry, dict) and "global_ranks" in entry:
                group = _group_of(entry)
                trace = RankTrace(
                    entry["rank"], head["global_rank"], head["now_ns"], head["reason"], entry["error"], entry["size"]
                )
                found.append((group, trace))
            elif not found:
                raise ValueError("a call stands before its group")
            else:
                trace = found[-1][1]
                is_message = isinstance(entry, dict) and entry.get("kind") == "message"
                entry = _checked(entry, _MESSAGE if is_message else _CALL, trace.size)
                if is_message:
                    trace.messages.append(entry)
                else:
                    (trace.halos if entry["kind"] == "halo" else trace.calls)[entry["sequence"]] = entry
    except RecursionError:
        raise ValueError(f"{path} is not a trace of torchtp: line {number}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a trace of torchtp: line {number}: {error}") from error
    return found
