"""Explanations as tables of plain text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtp.explanation import Explanation


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
    rows = [("one device", "1", as_bytes(first.single_bytes), "100.0%", "", "", "", "", "")]
    for each in told:
        rows.append(
            (
                as_mesh(each.mesh),
                str(math.prod(each.mesh.values())),
                as_bytes(each.kept_bytes),
                f"{each.share:.1%}",
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
        ("kept for backward, fullest rank", as_bytes(told.kept_bytes), f"{told.share:.1%} of it"),
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
