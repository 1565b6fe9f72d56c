"""F.interpolate of cut DTensors equals the single device, to second order, without a gather."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, H2, H4, HW, W2, assert_same, check, device_mesh_of, num_ranks
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchtp
from torchtp.testing import run_ranks

CASES = {
    "bilinear": {"size": (13, 21), "mode": "bilinear"},
    "corners": {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    "shrinking": {"scale_factor": 0.6, "mode": "bilinear"},
    "nearest": {"scale_factor": 2},
    "exact": {"size": (4, 17), "mode": "nearest-exact"},
    "antialiased": {"size": (3, 4), "mode": "bilinear", "antialias": True},
    "antialiased bicubic": {"scale_factor": (0.5, 1.7), "mode": "bicubic", "antialias": True},
    "bicubic": {"scale_factor": (1.5, 2.3), "mode": "bicubic"},
}


def run_case(name, mesh):
    torch.manual_seed(0)
    check(lambda x: F.interpolate(x, **CASES[name]), mesh, [torch.randn(2, 3, 7, 9).double()], cut_output=True)


@pytest.mark.parametrize("name", CASES)
def test_interpolate_cut_over_ranks_matches_reference(name):
    for mesh in (W2, H2, HW, H4, DATA_W):
        run_ranks(run_case, num_ranks(mesh), name, mesh)


def run_other_dims():
    torch.manual_seed(0)
    check(lambda x: F.interpolate(x, 17, mode="linear"), ((2,), (2,)), [torch.randn(2, 3, 7).double()])
    volume = torch.randn(1, 2, 4, 5, 7).double()
    check(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), ((2,), (4,)), [volume])


def test_interpolate_in_one_and_three_dims_matches_reference():
    run_ranks(run_other_dims, 2)


def run_pooled(mesh):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), [axis for axis, dim in enumerate(mesh[1]) if dim])
    torch.manual_seed(0)
    weight = torch.randn(3, 3, 1, 1).double()

    def spread(x, w):
        pooled = F.conv2d(x.mean((2, 3), keepdim=True), w)
        wide = F.interpolate(pooled, size=x.shape[2:], mode="bilinear")
        if isinstance(x, DTensor):
            assert wide.placements == x.placements
        return torch.cat([x, wide], 1).sin()

    columns = (
        9 + len(mesh[0]) + mesh[1][0]
    )  # images of one size that one mesh cuts in two ways tell nothing of what follows
    check(spread, mesh, [torch.randn(2, 3, 7, columns).double()], [weight])


@pytest.mark.parametrize("mesh", [W2, HW, DATA_W], ids=["w2", "h2_w2", "data_w"])
def test_a_pooled_map_is_spread_over_a_cut_one(mesh):
    run_ranks(run_pooled, num_ranks(mesh), mesh)


def run_inference():
    mesh = device_mesh_of((2,))
    torchtp.dtensor.mark(mesh, [0])
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 9).double()
    with torch.inference_mode(), torchtp.strict():
        for name, case in CASES.items():
            got = F.interpolate(distribute_tensor(x, mesh, [Shard(3)], src_data_rank=None), **case)
            assert got.placements == (Shard(3),)
            assert_same(name, got.full_tensor(), F.interpolate(x, **case))
        got = F.pad(distribute_tensor(x, mesh, [Shard(3)], src_data_rank=None), (2, 3, 1, 0), mode="circular")
        assert_same("circular", got.full_tensor(), F.pad(x, (2, 3, 1, 0), mode="circular"))


def test_interpolate_and_pad_in_inference_mode():
    run_ranks(run_inference, 2)
