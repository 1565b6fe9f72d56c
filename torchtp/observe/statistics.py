"""What the calls of this process's torchtp groups have cost: counts, latencies, bandwidths, and who was waited for."""

from __future__ import annotations

from dataclasses import dataclass

from torchtp.tables import as_bytes, as_seconds, table
from torchtp.trace import calls


@dataclass(frozen=True)
class CallStatistics:
    """Calls of one kind with messages of one size class; seconds from when a call's turn came until it was done.

    Of messages and halos: seconds that the program has spent in them, starting them and waiting.
    """

    op: str
    most_bytes: int  # messages of more than half of this and up to this
    count: int
    failed: int  # not in the figures below
    num_bytes: int  # of all messages; of one, the larger of what the rank reads and what it writes
    total_s: float
    queued_s: float  # before that, from the call: other calls of the group had to end first
    waited_s: float  # of total_s, for the last rank to come, or for the partner
    shortest_s: float
    median_s: float  # to a fifth
    late_s: float  # the 99th percentile, to a fifth
    longest_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes of messages a second, without the waiting for other ranks."""
        busy = self.total_s - self.waited_s
        return self.num_bytes / busy if busy > 0 else 0.0


@dataclass(frozen=True)
class GroupStatistics:
    """One process group, as this rank has seen it since it was made or since statistics were last reset."""

    group: str
    rank: int
    global_ranks: tuple[int, ...]  # of ranks 0, 1, ... of the group
    calls: tuple[CallStatistics, ...]
    # [rank][late]: how long rank waited for late, where that one came last. What messages and halos waited for their
    # partners is in this rank's own row.
    waited_s: tuple[tuple[float, ...], ...]

    def __str__(self) -> str:
        return _calls_and_waits(self)


@dataclass(frozen=True)
class Statistics:
    """Of all torchtp process groups of this process; prints as tables."""

    groups: tuple[GroupStatistics, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.groups)) or "no process group of torchtp has been used"


def stats(*, reset: bool = False) -> Statistics:
    """What every collective, message and exchange of halos of this process's torchtp groups has cost, by op and size.

    `print` it. Local: no communication, every rank has its own view, and each knows who of its group came when. With `reset` the
    counts start again from zero.
    """
    told = calls.statistics()
    if reset:
        calls.reset_statistics()
    return Statistics(tuple(_group(one) for one in told))


def _group(told: dict) -> GroupStatistics:
    rows = []
    for row in told["rows"]:
        figures = {key.replace("_ns", "_s"): value * 1e-9 for key, value in row.items() if key.endswith("_ns")}
        for name in ("median_s", "late_s"):  # middles of classes of durations, which may lie outside of what there was
            figures[name] = min(max(figures[name], figures["shortest_s"]), figures["longest_s"])
        rows.append(CallStatistics(**{key: row[key] for key in row if not key.endswith("_ns")}, **figures))
    rows.sort(key=lambda row: (row.op, row.most_bytes))
    return GroupStatistics(
        told["group"],
        told["rank"],
        tuple(told["global_ranks"]) or tuple(range(told["size"])),
        tuple(rows),
        tuple(tuple(ns * 1e-9 for ns in of_rank) for of_rank in told["waited_ns"]),
    )


def _calls_and_waits(told: GroupStatistics) -> str:
    """The calls of one process group: a line for each op and size, then who was waited for."""
    head = ("op", "up to", "calls", "failed", "median", "99 %", "longest", "queued", "waiting", "bandwidth")
    rows = [
        (
            row.op,
            as_bytes(row.most_bytes),
            f"{row.count:,}",
            f"{row.failed:,}" if row.failed else "",
            as_seconds(row.median_s),
            as_seconds(row.late_s),
            as_seconds(row.longest_s),
            as_seconds(row.queued_s / max(row.count, 1)),
            f"{row.waited_s / row.total_s:.0%}" if row.total_s else "",
            f"{row.bytes_per_s / 1e9:.2f} GB/s" if row.num_bytes else "",
        )
        for row in told.calls
    ]
    lines = [
        f"Process group {told.group!r} as rank {told.rank} of {len(told.global_ranks)} saw it",
        *table(head, rows),
    ]
    late = [sum(of_rank[rank] for of_rank in told.waited_s) for rank in range(len(told.global_ranks))]
    if any(late):
        ranks = range(len(late))
        lines += ["  Seconds that a rank (down) has waited for the last to come (across):"]
        waits = [
            (f"rank {rank}", *(f"{told.waited_s[rank][other]:.3f}" if rank != other else "" for other in ranks))
            for rank in ranks
        ]
        lines += table(("", *(f"rank {rank}" for rank in ranks)), waits)
    return "\n".join(lines)
