"""Norms of cut DTensors equal the single device, running statistics too, with plain and with DTensor weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, H4, HW, W3, W4, assert_same, check, device_mesh_of, num_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 4, 9, 11)


def over_channels(x, norm):
    return norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


CASES = {
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True).sin(),
    "batch_norm_eval": lambda x, w, b: F.batch_norm(
        x, torch.ones(4).double(), torch.full((4,), 2.0).double(), w, b
    ).sin(),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b).sin(),
    # its result is a view; autograd writes that gradient into one of the tensor behind it
    "instance_norm_in_place": lambda x, w, b: F.relu_(F.instance_norm(x, None, None, w, b)).mean((2, 3)).sin(),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b).sin(),
    "layer_norm": lambda x, w, b: over_channels(x, lambda y: F.layer_norm(y, (4,), w, b)).sin(),
    "rms_norm": lambda x, w, b: over_channels(x, lambda y: F.rms_norm(y, (4,), w)).sin() + b.view(4, 1, 1) * 0,
}


def run_case(name, mesh, kwargs):
    torchtp.dtensor.mark(init_device_mesh("cpu", mesh[0]), [axis for axis, dim in enumerate(mesh[1]) if dim])
    torch.manual_seed(0)
    parameters = [torch.rand(4).double() + 0.5, torch.randn(4).double()]
    check(CASES[name], mesh, [torch.randn(IMAGE).double()], parameters, **({"plain": False, "double": False} | kwargs))


@pytest.mark.parametrize("mesh", [W3, H4, HW, DATA_W], ids=["w3", "h4", "h2_w2", "data_w"])
@pytest.mark.parametrize("name", CASES)
def test_norms_match_reference_without_a_gather(name, mesh):
    # instance norm makes channels of the batch: where that is cut too, it gathers
    run_ranks(run_case, num_ranks(mesh), name, mesh, {"gathers": "instance_norm" in name and mesh == DATA_W})


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_eval", "group_norm", "layer_norm"])
def test_plain_weights_obey_the_mean_rule(name):
    run_ranks(run_case, 3, name, W3, {"plain": True})


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "dtensor"])
@pytest.mark.parametrize("name", CASES)
def test_norms_match_reference_to_second_order(name, plain):
    run_ranks(run_case, 3, name, W3, {"double": True, "gathers": True, "plain": plain})


OVER_CUT_DIMS = {
    "channels_and_image": (4, 9, 11),
    "image": (9, 11),
    "columns": (11,),
    "wide_shape": (2, 4, 9, 11),
}


def run_layer_norm_over_cut_dims(name, mesh, affine, kwargs):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), [axis for axis, dim in enumerate(mesh[1]) if dim])
    torch.manual_seed(0)
    shape = OVER_CUT_DIMS[name]
    parameters = [torch.rand(shape).double() + 0.5, torch.randn(shape).double()][:affine]

    def norm(x, weight=None, bias=None):
        return F.layer_norm(x * 3 + 1, shape, weight, bias).sin()

    check(norm, mesh, [torch.randn(IMAGE).double()], parameters, **({"double": False} | kwargs))


@pytest.mark.parametrize("affine", [0, 1, 2])
@pytest.mark.parametrize("mesh", [W3, W4, H4, HW, DATA_W], ids=["w3", "w4", "h4", "h2_w2", "data_w"])
@pytest.mark.parametrize("name", OVER_CUT_DIMS)
def test_layer_norm_over_cut_dims_matches_reference_without_a_gather(name, mesh, affine):
    run_ranks(run_layer_norm_over_cut_dims, num_ranks(mesh), name, mesh, affine, {"plain": affine == 2})


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "dtensor"])
@pytest.mark.parametrize("name", OVER_CUT_DIMS)
def test_layer_norm_over_cut_dims_to_second_order(name, plain):
    kwargs = {"plain": plain, "double": True, "gathers": True}
    run_ranks(run_layer_norm_over_cut_dims, 3, name, W3, 2, kwargs)


def run_layer_norm_where_a_rank_has_no_row():
    layout = torchtp.Layout(init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w")), {"h": -2, "w": -1})
    norm = torchtp.parallelize(nn.LayerNorm(2).double(), layout, output="full", reduce=False)
    x = layout.shard(torch.tensor([[2.0, 5.0]], dtype=torch.float64)).requires_grad_()
    (grad,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
    grad.full_tensor().pow(2).sum().backward()
    return type(norm.weight.grad)


def test_the_second_derivative_of_a_layer_norm_gives_plain_gradients_also_where_no_row_is():
    assert run_ranks(run_layer_norm_where_a_rank_has_no_row, 4) == [torch.Tensor] * 4


def run_running_statistics(mesh, momentum):
    device_mesh = init_device_mesh("cpu", mesh[0])
    single, mine = nn.BatchNorm2d(4, momentum=momentum).double(), nn.BatchNorm2d(4, momentum=momentum).double()
    for step in range(3):
        x = torch.randn(IMAGE, generator=torch.Generator().manual_seed(step)).double() * 3 + 1
        expected = single(x)
        got = mine(distribute_tensor(x, device_mesh, [Shard(dim) for dim in mesh[1]], src_data_rank=None))
        assert_same("output", got.full_tensor(), expected)
    for name, buffer in single.named_buffers():
        assert_same(name, mine.get_buffer(name), buffer)
    x = torch.randn(IMAGE).double()
    cut = distribute_tensor(x, device_mesh, [Shard(dim) for dim in mesh[1]], src_data_rank=None)
    assert_same("in evaluation", mine.eval()(cut).full_tensor(), single.eval()(x))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_the_whole(momentum):
    run_ranks(run_running_statistics, 4, HW, momentum)
