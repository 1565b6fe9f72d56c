"""A cut tensor brought to any other cut: the part is right, and no rank is sent more than its part."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchtp
from torchtp.dtensor import moving
from torchtp.dtensor.cut import cut_locally
from torchtp.dtensor.upstream import local_of, spec_of
from torchtp.testing import run_ranks


def run_all(shape, backwards):
    """Placements of two axes with different dims, brought to all others."""
    mesh = init_device_mesh("cpu", (2, 2))
    torchtp.dtensor.mark(mesh, [0, 1])
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    if backwards:
        whole = whole.transpose(0, -1)
    places = [Replicate(), *(Shard(dim) for dim in range(whole.dim()))]
    placements = [pair for pair in itertools.product(places, places) if pair[0] != pair[1] or pair[0].is_replicate()]
    for before, after in itertools.product(placements, placements):
        tensor = distribute_tensor(whole, mesh, before, src_data_rank=None)
        part = moving.recut(local_of(tensor), spec_of(tensor), after)
        assert torch.equal(part, cut_locally(whole, mesh, after)), f"{before} to {after}"


@pytest.mark.parametrize("backwards", [False, True], ids=["dense", "transposed"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 7), (3, 4, 1, 6), (4, 5)], ids=str)
def test_all_cuts_of_two_axes(shape, backwards):
    run_ranks(run_all, 4, shape, backwards)


def run_turned(before, after):
    """Axes that take each other's dims: all by swaps, nothing is left to upstream, which gathers."""
    mesh = init_device_mesh("cpu", (2, 2))
    torchtp.dtensor.mark(mesh, [0, 1])
    whole = torch.arange(2 * 3 * 5 * 7).view(2, 3, 5, 7)
    tensor = distribute_tensor(whole, mesh, before, src_data_rank=None)
    left = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "redistributed", lambda local, spec, to: left.append((spec.placements, to)) or local)
        part = moving.recut(local_of(tensor), spec_of(tensor), after)
    assert all(now == to for now, to in left)
    assert torch.equal(part, cut_locally(whole, mesh, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 3), (3, 2)), ((1, 0), (0, 1)), ((0, 1), (1, 2)), ((0, 1), (2, 0)), ((3, 2), (2, 1))],
    ids=str,
)
def test_dims_that_are_exchanged_are_not_gathered(before, after):
    run_ranks(run_turned, 4, tuple(map(Shard, before)), tuple(map(Shard, after)))
