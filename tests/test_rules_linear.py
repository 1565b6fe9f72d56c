"""Linear layers along whole features of cut DTensors equal the single device, outside of parallelize too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, H4, HW, W3, assert_same, check, device_mesh_of, num_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 5, 9, 11)


def along_channels(x, weight, bias=None):
    return F.linear(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)


def contiguous(x, weight, bias):
    return F.linear(x.permute(0, 2, 3, 1).contiguous(), weight, bias).sin()


def stacked(x, weight, bias):
    hidden = F.gelu(F.linear(x.permute(0, 2, 3, 1), weight, bias))
    return F.linear(hidden, weight.t()).square()


def pooled(x, weight, bias):
    return F.linear(x.mean((2, 3)), weight, bias).sin()


def on_both(x, weight, bias):
    """One weight meets cut rows and the pooled image."""
    gate = F.linear(x.mean((2, 3)), weight, bias).sigmoid()
    return along_channels(x, weight).sin() * gate[:, :, None, None]


CASES = {
    "along_channels": along_channels,
    "without_bias": lambda x, weight, bias=None: along_channels(x, weight).sin(),
    "contiguous": contiguous,
    "stacked": stacked,
    "pooled": pooled,
    "on_both": on_both,
    "vector": lambda x, weight, bias: F.linear(x.permute(0, 2, 3, 1), weight[0], bias[0]).sin(),
    "broadcast_bias": lambda x, weight, bias: along_channels(x, weight, bias[None]).sin(),
}


def run_case(name, mesh, plain):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), [axis for axis, dim in enumerate(mesh[1]) if dim])
    torch.manual_seed(0)
    parameters = [torch.randn(3, 5).double(), torch.randn(3).double()]
    if name == "without_bias":
        parameters.pop()
    check(CASES[name], mesh, [torch.randn(IMAGE).double()], parameters, plain=plain)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "dtensor"])
@pytest.mark.parametrize("mesh", [W3, H4, HW, DATA_W], ids=["w3", "h4", "h2_w2", "data_w"])
@pytest.mark.parametrize("name", CASES)
def test_linear_matches_reference_without_a_gather(name, mesh, plain):
    run_ranks(run_case, num_ranks(mesh), name, mesh, plain)


def run_features_cut():
    mesh = ((2,), (3,))
    torchtp.dtensor.mark(device_mesh_of((2,)), [0])
    parameters = [torch.randn(4, 11).double(), torch.randn(4).double()]
    check(F.linear, mesh, [torch.randn(IMAGE).double()], parameters, gathers=True)


def test_cut_features_are_gathered():
    run_ranks(run_features_cut, 2)


def run_inference():
    mesh = device_mesh_of((2,))
    torchtp.dtensor.mark(mesh, [0])
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 3).double(), torch.randn(2, 9, 11, 5).double()
    with torch.inference_mode(), torchtp.strict():
        cut = distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None)
        got = layer(cut)
        assert got.placements == (Shard(2),)
        assert_same("output", got.full_tensor(), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(distribute_tensor(x.float(), mesh, [Shard(2)], src_data_rank=None)).dtype is torch.bfloat16


def test_linear_in_inference_mode_and_under_autocast():
    run_ranks(run_inference, 2)
