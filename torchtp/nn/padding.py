"""The rows a padded window needs of a cut dim, in every mode of torch's padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Interval = tuple[int, int]


@dataclass(frozen=True)
class CutDim:
    """A dim that is cut over the ranks of a group."""

    dim: int
    extent: int
    group: str
    rank: int


def padded_rows(local: torch.Tensor, cut: CutDim, wanted: Sequence[Interval], mode: str) -> torch.Tensor:
    """This rank's interval of `wanted` (one for each rank) of a dim padded without end in `mode`; differentiable.

    `mode` is "reflect", "replicate" or "circular". Collective over the group.
    """
    if mode == "circular":
        return _circular(local, cut, wanted)
    sources = [[_source(row, cut.extent, mode) for row in range(*interval)] for interval in wanted]
    hulls = [(min(rows), max(rows) + 1) if rows else (0, 0) for rows in sources]
    pulled = _pull(local, cut, hulls)
    mine, begin = sources[cut.rank], hulls[cut.rank][0]
    if mine == list(range(*hulls[cut.rank])):
        return pulled
    return pulled.index_select(cut.dim, torch.tensor([row - begin for row in mine], device=local.device))


def _circular(local: torch.Tensor, cut: CutDim, wanted: Sequence[Interval]) -> torch.Tensor:
    """Piece by piece: one turn of the dim after the other."""
    turns = range(
        min((begin // cut.extent for begin, end in wanted if begin < end), default=0),
        max((-(-end // cut.extent) for begin, end in wanted if begin < end), default=1),
    )
    pieces = []
    for turn in turns:
        first = turn * cut.extent
        pieces.append(
            _pull(
                local,
                cut,
                [
                    (max(begin, first) - first, min(end, first + cut.extent) - first)
                    if max(begin, first) < min(end, first + cut.extent)
                    else (0, 0)
                    for begin, end in wanted
                ],
            )
        )
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)


def _source(row: int, extent: int, mode: str) -> int:
    if mode == "replicate":
        return min(max(row, 0), extent - 1)
    row = -row if row < 0 else row
    return row if row < extent else 2 * (extent - 1) - row


def _pull(local: torch.Tensor, cut: CutDim, intervals: Sequence[Interval]) -> torch.Tensor:
    begins, ends = [begin for begin, _ in intervals], [end for _, end in intervals]
    return torch.ops.torchtp.pull(local, cut.dim, cut.extent, begins, ends, cut.group)
