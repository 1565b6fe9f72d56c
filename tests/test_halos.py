"""Halos that stay where they arrive, against the rows of the whole tensor: one dim cut, two dims with their corners."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.sharding import Sharding
from torchtp import _C
from torchtp.testing import run_ranks

LAYOUTS = [torch.contiguous_format, torch.channels_last]
Rows = tuple[int, int]


def _owned(extent: int, size: int, rank: int) -> Rows:
    return _C.owned(extent, size, rank)


def _wanted(extent: int, size: int, reach: int, rng: random.Random) -> tuple[list[int], list[int]]:
    begins, ends = [], []
    for rank in range(size):
        begin, end = _owned(extent, size, rank)
        begins.append(begin - rng.randint(0, reach))
        ends.append(max(begins[-1], end + rng.randint(0, reach)))
    return begins, ends


def _beside(own: Rows, wanted: Rows, extent: int) -> tuple[Rows, Rows]:
    begin, end = max(wanted[0], 0), min(wanted[1], extent)
    if begin >= end:
        return (0, 0), (0, 0)
    return (min(begin, own[0]), own[0]), (own[1], max(end, own[1]))


def _same(found: Tensor, full: Tensor, dim: int, rows: Rows, wanted: Rows) -> None:
    expected = full.narrow(dim, rows[0], rows[1] - rows[0]).clone()
    for index, row in enumerate(range(*rows)):
        if not wanted[0] <= row < wanted[1]:
            expected.select(dim, index).zero_()
    assert torch.equal(found, expected)


def _one_dim(seed: int) -> None:
    rng, rank, size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    for _ in range(12):
        dim = rng.choice([2, 3])
        extents = [rng.choice([1, 2]), rng.choice([1, 3, 16]), rng.randint(2, 23), rng.randint(2, 23)]
        layout, dtype = rng.choice(LAYOUTS), rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.int8])
        full = torch.arange(torch.Size(extents).numel()).remainder(127).reshape(extents).to(dtype)
        full = full.contiguous(memory_format=layout)
        begins, ends = _wanted(extents[dim], size, rng.choice([1, 3, 9]), rng)
        sharding = Sharding((size,), (dim,))
        args = (1 - dim % 2, dim, extents[dim], begins, ends, sharding.groups[0])
        mine = sharding.shard(full)
        before, after = _C.pull_halos([mine], *args)
        own, wanted = _owned(extents[dim], size, rank), (begins[rank], ends[rank])
        for found, rows in zip((before, after), _beside(own, wanted, extents[dim]), strict=True):
            _same(found, full, dim, rows, wanted)
            # What is empty, or has one channel, could be either.
            if found.numel() and mine.is_contiguous() != mine.is_contiguous(memory_format=torch.channels_last):
                assert found.is_contiguous(memory_format=layout)


def _two_dims(seed: int) -> None:
    rng, rank = random.Random(seed), dist.get_rank()
    ranks = (rank // 2, rank % 2)
    for _ in range(8):
        extents = [2, rng.choice([1, 4, 16]), rng.randint(4, 17), rng.randint(4, 17)]
        full = torch.randn(extents).contiguous(memory_format=rng.choice(LAYOUTS))
        sharding = Sharding((2, 2), (2, 3))
        own = sharding.shard(full)
        begins, ends = _wanted(extents[2], 2, 3, rng)
        above, below = _C.pull_halos([own], 0, 2, extents[2], begins, ends, sharding.groups[0])
        rows = _beside(_owned(extents[2], 2, ranks[0]), (begins[ranks[0]], ends[ranks[0]]), extents[2])
        tall = full.narrow(2, rows[0][0], rows[1][1] - rows[0][0]) if rows[1][1] else None
        if tall is None:
            continue
        begins, ends = _wanted(extents[3], 2, 3, rng)
        stack = [piece for piece in (above, own, below) if piece.shape[2]]
        left, right = _C.pull_halos(stack, 2, 3, extents[3], begins, ends, sharding.groups[1])
        wanted = (begins[ranks[1]], ends[ranks[1]])
        columns = _beside(_owned(extents[3], 2, ranks[1]), wanted, extents[3])
        for found, part in zip((left, right), columns, strict=True):
            _same(found, tall, 3, part, wanted)


def _few_columns() -> None:
    rank = dist.get_rank()
    group = Sharding((2,), (3,)).groups[0]
    full = torch.arange(2 * 4 * 2000 * 300).remainder(101).reshape(2, 4, 2000, 300)
    for reach, dtype in itertools.product(
        (1, 2, 3, 4, 5, 8), (torch.float32, torch.float64, torch.bfloat16, torch.int8)
    ):
        mine = full[..., 150 * rank : 150 * rank + 150].to(dtype)
        begins, ends = [0, 150 - reach], [150 + reach, 300]
        pulled = torch.ops.torchtp.pull(mine, 3, 300, begins, ends, group)
        assert torch.equal(pulled, full[..., begins[rank] : ends[rank]].to(dtype))
        pushed = torch.ops.torchtp.push_add(pulled, 3, 300, begins, ends, group)
        mine[..., 150 - reach :] *= 1 + (rank == 0)
        mine[..., :reach] *= 1 + (rank == 1)
        assert torch.equal(pushed, mine)


# Runs of a few bytes far apart, in messages of several pieces whose ends fall into a run.
@pytest.mark.parametrize("backend", ["torchtp", "gloo"])
def test_few_columns_of_a_wide_image(backend):
    run_ranks(_few_columns, 2, backend=backend)


@pytest.mark.parametrize("backend", ["torchtp", "gloo"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_halos_are_the_rows_beside_own_ones(backend, size):
    run_ranks(_one_dim, size, size, backend=backend)


@pytest.mark.parametrize("backend", ["torchtp", "gloo"])
def test_halos_of_stacked_pieces_have_the_corners(backend):
    run_ranks(_two_dims, 4, 5, backend=backend)
