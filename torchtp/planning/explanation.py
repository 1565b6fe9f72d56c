"""What `explain` tells: what a training step on cut images would keep, send and gather, as data and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchtp.tables import as_bytes, as_mesh, table


@dataclass(frozen=True)
class Gather:
    """An op without a rule: a tensor of `shape` is gathered on every rank, `times` a step."""

    op: str
    module: str  # path; "" is the module itself
    phase: str  # "forward" or "backward"
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int  # of the whole tensor, each time
    times: int


@dataclass(frozen=True)
class Exchange:
    """Halos of an op; `num_bytes` is what the rank that sends most of them sends a step."""

    op: str
    module: str
    phase: str
    num_bytes: int
    num_exchanges: int
    num_beyond_neighbours: int  # of these, with ranks farther away than the next: a halo wider than a part


@dataclass(frozen=True)
class Collective:
    """Sums and statistics of an op over all its parts, or the parts of a gather; bytes each rank hands in a step."""

    op: str
    module: str
    phase: str
    num_bytes: int
    times: int


@dataclass(frozen=True)
class EmptyParts:
    """The first op that takes a tensor of which some ranks along `axis` hold nothing."""

    op: str
    module: str
    phase: str
    axis: str
    dim: int
    extent: int
    num_empty: int


@dataclass(frozen=True)
class RankCost:
    """One rank's share of a step, by its place on the axes that cut images."""

    coordinates: dict[str, int]
    kept_bytes: int
    exchanged_bytes: int
    num_exchanges: int
    collective_bytes: int
    num_collectives: int


@dataclass(frozen=True)
class Explanation:
    """What a training step costs, counted by `explain`; `print` it for a table."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    mesh: dict[str, int]
    single_bytes: int  # kept for backward on a single device
    gradient_bytes: int  # averaged over all ranks
    ranks: tuple[RankCost, ...]
    gathers: tuple[Gather, ...]
    exchanges: tuple[Exchange, ...]
    collectives: tuple[Collective, ...]
    empty: tuple[EmptyParts, ...]

    @property
    def kept_bytes(self) -> int:
        """Kept for backward on the fullest rank, without parameters and the image."""
        return max(rank.kept_bytes for rank in self.ranks)

    @property
    def share(self) -> float:
        """Kept on the fullest rank : on a single device."""
        return self.kept_bytes / self.single_bytes if self.single_bytes else 0.0

    @property
    def exchanged_bytes(self) -> int:
        """Halos a step that the rank that sends most sends."""
        return max(rank.exchanged_bytes for rank in self.ranks)

    @property
    def num_exchanges(self) -> int:
        """Exchanges of halos a step; every rank of an axis takes part in each."""
        return max(rank.num_exchanges for rank in self.ranks)

    @property
    def collective_bytes(self) -> int:
        """What a rank hands to collectives other than the gradients' a step."""
        return max(rank.collective_bytes for rank in self.ranks)

    @property
    def num_collectives(self) -> int:
        """Collectives a step, without the gradients' buckets."""
        return max(rank.num_collectives for rank in self.ranks)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of whole tensors that ops without a rule make every rank hold a step, if only for a moment."""
        return sum(gather.num_bytes * gather.times for gather in self.gathers)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


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
    lines = [f"A training step on {_images(first)}, gradients of {as_bytes(first.gradient_bytes)}", *table(head, rows)]
    thin = [as_mesh(each.mesh) for each in told if any(e.num_beyond_neighbours for e in each.exchanges)]
    idle = [as_mesh(each.mesh) for each in told if each.empty]
    if thin:
        lines.append(f"Wasteful, parts are thinner than a halo: {' '.join(thin)}")
    if idle:
        lines.append(f"Wasteful, ranks hold nothing of some activations: {' '.join(idle)}")
    return "\n".join(lines)


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
        yield from table(
            ("op", "module", "", "shape", "bytes", "times"),
            [(g.op, g.module, g.phase, str(g.shape), as_bytes(g.num_bytes), str(g.times)) for g in told.gathers],
        )
    beyond = [exchange for exchange in told.exchanges if exchange.num_beyond_neighbours]
    if beyond:
        yield from ("", "Wasteful: halos that reach beyond the next rank, the parts are too thin:")
        yield from table(
            ("op", "module", "", "bytes", "exchanges"),
            [(e.op, e.module, e.phase, as_bytes(e.num_bytes), str(e.num_exchanges)) for e in beyond],
        )
    if told.empty:
        yield from ("", "Wasteful: ranks that hold nothing, from this op on:")
        yield from table(
            ("op", "module", "", "axis", "dim", "extent", "empty ranks"),
            [(e.op, e.module, e.phase, e.axis, str(e.dim), str(e.extent), str(e.num_empty)) for e in told.empty],
        )
