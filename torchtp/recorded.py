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


def _read_one(path: Path) -> list[tuple[Group, RankTrace]]:
    data = path.read_bytes()
    try:
        if not data.strip():
            raise ValueError("it is empty")
        head, *rest = [json.loads(line) for line in data.decode().splitlines()]
        if head["torchtp_trace"] != 1:
            raise ValueError(f"it is of version {head['torchtp_trace']}")
        found: list[tuple[Group, RankTrace]] = []
        for entry in rest:
            if "global_ranks" in entry:
                trace = RankTrace(
                    entry["rank"], head["global_rank"], head["now_ns"], head["reason"], entry["error"], entry["size"]
                )
                found.append(((entry["group"], tuple(entry["global_ranks"])), trace))
            elif entry["kind"] == "message":
                found[-1][1].messages.append(entry)
            else:
                trace = found[-1][1]
                (trace.halos if entry["kind"] == "halo" else trace.calls)[entry["sequence"]] = entry
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of torchtp: {error}") from error
    return found
