"""Rows that two mesh axes hold, along one dim or several, reach the ranks they belong to: reshapes, slices and what is joined."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from ranks_device import moved
from rules import device_mesh_of
from torch.distributed.tensor import Replicate, Shard

import torchtp
from torchtp.dtensor.cut import cut_locally, full_of
from torchtp.dtensor.routing import joined, picked, put
from torchtp.dtensor.wrapping import same_order, wrap
from torchtp.testing import run_ranks

MESHES = [(2, 2), (2, 3), (3, 2)]
NESTED = (Shard(1), Shard(1))
RESHAPES = [
    ((1, 3, 4, 6), (1, 3, 24)),
    ((1, 3, 5, 7), (1, 3, 35)),
    ((2, 3, 3, 5), (6, 3, 5)),
    ((1, 14, 14, 3), (1, 196, 3)),
    ((1, 2, 3, 5), (5, 6)),
    ((4, 6, 1, 1), (3, 8, 1)),
    ((2, 3, 4, 5), (120,)),
    ((2, 3, 4, 5), (10, 12)),
    ((1, 35, 3), (1, 5, 7, 3)),
    ((5, 4, 4, 2), (5, 16, 2)),
    ((1, 7, 4), (7, 2, 2)),
    ((1, 1), ()),
]


def _mesh(sizes):
    mesh = device_mesh_of(sizes)
    torchtp.dtensor.mark(mesh, range(len(sizes)))
    return mesh


def _cut(whole, mesh, placements):
    return wrap(cut_locally(whole, mesh, placements), mesh, placements, whole.shape)


def _check(tensor, expected):
    assert torch.equal(full_of(tensor), expected)
    assert torch.equal(tensor.to_local(), cut_locally(expected, tensor.device_mesh, tensor.placements))


def run_reshapes(sizes, before, after):
    mesh = _mesh(sizes)
    whole = moved(torch.arange(torch.Size(before).numel(), dtype=torch.float64).reshape(before))
    for cuts in itertools.product([None, *range(len(before))], repeat=len(sizes)):
        if not any(dim is not None for dim in cuts):
            continue
        placements = tuple(Replicate() if dim is None else Shard(dim) for dim in cuts)
        reshaped = _cut(whole, mesh, placements).view(after)
        _check(reshaped, whole.view(after))
        lost = sum(isinstance(p, Replicate) for p in reshaped.placements) - cuts.count(None)
        cut_one_row = any(dim is not None and before[dim] == 1 for dim in cuts)
        assert lost <= 0 or cut_one_row or min(after) < max(sizes), (cuts, reshaped.placements)


@pytest.mark.parametrize("sizes", MESHES)
def test_every_cut_of_two_axes_stays_through_every_reshape(sizes):
    for before, after in RESHAPES:
        run_ranks(run_reshapes, math.prod(sizes), sizes, before, after)


def test_cuts_of_three_axes_stay_through_reshapes():
    for before, after in [((1, 3, 4, 5, 6), (1, 3, 120)), ((1, 120, 3), (1, 4, 6, 5, 3)), ((2, 3, 4, 5), (6, 20))]:
        run_ranks(run_reshapes, 8, (2, 2, 2), before, after)


def run_orders(sizes):
    """Pixels that lie channels last as tokens: on the way to its rank a part may be one row, which tells no order."""
    mesh = _mesh(sizes)
    for rows, columns in itertools.product((8, 15, 16), (9, 16, 17)):
        image = moved(torch.rand(1, 4, rows, columns))
        placements = (Shard(1), Shard(0))
        part = cut_locally(image, mesh, (Shard(3), Shard(2))).contiguous().permute(2, 3, 0, 1)
        pixels = wrap(part, mesh, placements, torch.Size((rows, columns, 1, 4)))
        tokens, expected = (pixel.reshape(1, -1, 4) for pixel in (pixels, image.permute(2, 3, 0, 1)))
        _check(tokens, expected)
        assert same_order(expected.shape, tokens.stride(), expected.stride()), (rows, columns, tokens.stride())


@pytest.mark.parametrize("sizes", MESHES)
def test_every_rank_s_part_of_a_reshape_lies_in_the_order_of_one_device(sizes):
    run_ranks(run_orders, math.prod(sizes), sizes, backend="gloo", timeout=150)


def run_rows(sizes):
    mesh = _mesh(sizes)
    for extent in (1, 2, 5, 13, 24):
        whole = moved(torch.randn(3, extent, 2, generator=torch.Generator().manual_seed(extent)))
        for begin, end, step in itertools.product((0, 1, 4), (1, 3, extent), (1, 2, 5)):
            rows = range(min(begin, extent), max(min(begin, extent), min(end, extent)), step)
            expected = whole[:, rows.start : rows.stop : rows.step]
            part = picked(_cut(whole, mesh, NESTED), 1, rows)
            _check(part, expected)
            written = _cut(whole.clone(), mesh, NESTED)
            put(part.to_local() * 2, written, 1, rows)
            expected = whole.clone()
            expected[:, rows.start : rows.stop : rows.step] *= 2
            _check(written, expected)


@pytest.mark.parametrize("sizes", MESHES)
def test_rows_of_a_dim_that_both_axes_cut_are_taken_and_put_back(sizes):
    run_ranks(run_rows, math.prod(sizes), sizes)


def run_joined(sizes):
    mesh = _mesh(sizes)
    for extents in [(1, 12), (5, 0, 1), (1, 1), (7, 13, 4)]:
        pieces = [torch.randn(2, extent, 3, dtype=torch.float64) for extent in extents]
        pieces = [
            moved(torch.full_like(piece, number) + torch.arange(piece.size(1))[:, None] / 100)
            for number, piece in enumerate(pieces)
        ]
        parts = [cut_locally(piece, mesh, NESTED) for piece in pieces]
        expected = torch.cat(pieces, 1)
        _check(wrap(joined(parts, extents, mesh, NESTED, 1), mesh, NESTED, expected.shape), expected)
    for dtype in (torch.bool, torch.int32, torch.bfloat16, torch.complex64):
        whole = moved(torch.arange(26).reshape(2, 13).remainder(3).to(dtype))
        _check(picked(_cut(whole, mesh, NESTED), 1, range(2, 13)), whole[:, 2:])


@pytest.mark.parametrize("sizes", MESHES)
def test_tensors_are_joined_along_a_dim_that_both_axes_cut(sizes):
    run_ranks(run_joined, math.prod(sizes), sizes)


def run_by_upstream(sizes):
    """What people call themselves, of chunks of unequal length."""
    mesh = _mesh(sizes)
    for extent in (1, 5, 33, 50):
        whole = moved(torch.arange(2 * extent * 3).view(2, extent, 3))
        tensor = _cut(whole, mesh, NESTED)
        assert torch.equal(tensor.full_tensor(), whole)
        for placements in [
            (Replicate(), Replicate()),
            (Shard(0), Shard(1)),
            (Shard(2), Replicate()),
            (Shard(1), Shard(2)),
        ]:
            _check(tensor.redistribute(placements=placements), whole)
            _check(_cut(whole, mesh, placements).redistribute(placements=NESTED), whole)


@pytest.mark.parametrize("sizes", MESHES)
def test_dtensor_s_own_redistribution_of_unequal_chunks_is_right(sizes):
    run_ranks(run_by_upstream, math.prod(sizes), sizes)


def run_other_dim():
    """By what each rank has, as often as the pieces fit: nobody is sent the whole."""
    mesh = _mesh((dist.get_world_size(),))
    whole = moved(torch.arange(2 * 7 * 11 * 5).view(2, 7, 11, 5))
    for before, after in itertools.permutations(range(whole.dim()), 2):
        tensor = _cut(whole, mesh, (Shard(before),))
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(functional_collectives, "all_gather_tensor")
            patch.delattr(functional_collectives, "all_gather_single", raising=False)
            cut_anew = tensor.redistribute(placements=(Shard(after),))
        _check(cut_anew, whole)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_dtensor_s_own_redistribution_to_another_dim_gathers_nothing(num_ranks):
    run_ranks(run_other_dim, num_ranks)


def run_rare_dtypes(sizes):
    """What gloo itself does not move."""
    mesh = _mesh(sizes)
    for dtype in (torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bool):
        whole = moved(torch.arange(2 * 5 * 3).view(2, 5, 3).to(dtype))
        for placements in [NESTED, (Shard(1), Shard(2)), (Shard(2), Replicate())]:
            tensor = _cut(whole, mesh, placements)
            for full in (full_of(tensor), tensor.full_tensor(), tensor.redistribute(placements=NESTED).full_tensor()):
                assert full.dtype == dtype
                assert torch.equal(full.float(), whole.float())


def test_dtypes_that_gloo_does_not_move():
    run_ranks(run_rare_dtypes, 4, (2, 2), backend="gloo")
