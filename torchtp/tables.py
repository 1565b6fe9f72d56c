"""Explanations and statistics as tables of plain text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtp.bench import CallTime, StepTime
    from torchtp.explanation import Explanation
    from torchtp.statistics import GroupStatistics


def explained(told: Explanation) -> str:
    """One explanation: the sums, then what is gathered and what is wasteful, op by op."""
    return "\n".join(_lines(told))


def compared(told: Sequence[Explanation]) -> str:
    """Explanations of one module on several meshes as one table."""
    first = told[0]
    head = (
        "mesh",
        "ranks",
        "kept a rank",
        "of one device",
        "halos sent",
        "exchanges",
        "collectives",
        "gathers",
        "gathered",
    )
    rows = [
        ("one device", "1", as_bytes(first.single_bytes), "100.0%" if first.single_bytes else "", "", "", "", "", "")
    ]
    for each in told:
        rows.append(
            (
                as_mesh(each.mesh),
                str(math.prod(each.mesh.values())),
                as_bytes(each.kept_bytes),
                f"{each.share:.1%}" if each.single_bytes else "",
                as_bytes(each.exchanged_bytes),
                str(each.num_exchanges),
                str(each.num_collectives),
                str(sum(gather.times for gather in each.gathers)),
                as_bytes(each.gathered_bytes),
            )
        )
    lines = [f"A training step on {_images(first)}, gradients of {as_bytes(first.gradient_bytes)}", *_table(head, rows)]
    thin = [as_mesh(each.mesh) for each in told if any(e.num_beyond_neighbours for e in each.exchanges)]
    idle = [as_mesh(each.mesh) for each in told if each.empty]
    if thin:
        lines.append(f"Wasteful, parts are thinner than a halo: {' '.join(thin)}")
    if idle:
        lines.append(f"Wasteful, ranks hold nothing of some activations: {' '.join(idle)}")
    return "\n".join(lines)


def of_calls(told: GroupStatistics) -> str:
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
        *_table(head, rows),
    ]
    late = [sum(of_rank[rank] for of_rank in told.waited_s) for rank in range(len(told.global_ranks))]
    if any(late):
        ranks = range(len(late))
        lines += ["  Seconds that a rank (down) has waited for the last to come (across):"]
        waits = [
            (f"rank {rank}", *(f"{told.waited_s[rank][other]:.3f}" if rank != other else "" for other in ranks))
            for rank in ranks
        ]
        lines += _table(("", *(f"rank {rank}" for rank in ranks)), waits)
    return "\n".join(lines)


def of_call_times(measured: Sequence[CallTime]) -> str:
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
    return "\n".join(_table(head, rows))


def of_step_times(measured: Sequence[StepTime]) -> str:
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
    return "\n".join(_table(head, rows))


def as_seconds(seconds: float) -> str:
    """A duration as people read it: "1.5 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def as_bytes(number: int) -> str:
    """A number of bytes as people read it: "1.5 MiB"."""
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def as_mesh(mesh: Mapping[str, int]) -> str:
    """A mesh as the command line takes it: "h=2,w=2"."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def _images(told: Explanation) -> str:
    return f"{' and '.join(str(shape) for shape in told.shapes)} of {told.dtype}"


def _lines(told: Explanation) -> Iterator[str]:
    ranks = math.prod(told.mesh.values())
    yield f"A training step on {_images(told)}, mesh {as_mesh(told.mesh)}: {ranks} ranks"
    yield ""
    rows = [
        ("kept for backward, one device", as_bytes(told.single_bytes), ""),
        (
            "kept for backward, fullest rank",
            as_bytes(told.kept_bytes),
            f"{told.share:.1%} of it" if told.single_bytes else "",
        ),
        ("halos a rank sends", as_bytes(told.exchanged_bytes), f"in {told.num_exchanges} exchanges"),
        ("sums, statistics, gathers", as_bytes(told.collective_bytes), f"in {told.num_collectives} collectives"),
        ("gradients averaged", as_bytes(told.gradient_bytes), f"over {ranks} ranks"),
        ("gathered on every rank", as_bytes(told.gathered_bytes), f"by {sum(g.times for g in told.gathers)} ops"),
    ]
    for name, number, remark in rows:
        yield f"  {name:<32}{number:>12}  {remark}".rstrip()
    if told.gathers:
        yield from ("", "Gathered, because the op has no rule for cut tensors:")
        yield from _table(
            ("op", "module", "", "shape", "bytes", "times"),
            [(g.op, g.module, g.phase, str(g.shape), as_bytes(g.num_bytes), str(g.times)) for g in told.gathers],
        )
    beyond = [exchange for exchange in told.exchanges if exchange.num_beyond_neighbours]
    if beyond:
        yield from ("", "Wasteful: halos that reach beyond the next rank, the parts are too thin:")
        yield from _table(
            ("op", "module", "", "bytes", "exchanges"),
            [(e.op, e.module, e.phase, as_bytes(e.num_bytes), str(e.num_exchanges)) for e in beyond],
        )
    if told.empty:
        yield from ("", "Wasteful: ranks that hold nothing, from this op on:")
        yield from _table(
            ("op", "module", "", "axis", "dim", "extent", "empty ranks"),
            [(e.op, e.module, e.phase, e.axis, str(e.dim), str(e.extent), str(e.num_empty)) for e in told.empty],
        )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
