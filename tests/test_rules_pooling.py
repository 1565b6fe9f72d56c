"""Pools, resampling and mirroring pads of cut DTensors equal the single device, without a gather."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rules import DATA_W, H4, HW, W3, check, device_mesh_of, num_ranks
from torch.distributed.tensor import Shard, distribute_tensor

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 4, 9, 11)
CASES = {
    "max": (lambda x: F.max_pool2d(x, 2), IMAGE),
    "max_stem": (lambda x: F.max_pool2d(x.square(), 3, 2, 1).sin(), IMAGE),
    "max_channels_last": (
        lambda x: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 3, 2, 1).square(),
        IMAGE,
    ),
    "max_ceil_dilated": (lambda x: F.max_pool2d(x, 3, 2, 1, 2, ceil_mode=True), IMAGE),
    "max_indices": (lambda x: F.max_pool2d(x.detach(), 3, 2, return_indices=True)[1], IMAGE),
    "avg": (lambda x: F.avg_pool2d(x, 2), IMAGE),
    "avg_padded": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), IMAGE),
    "avg_divisor": (lambda x: F.avg_pool2d(x, 3, 1, 1, divisor_override=5), IMAGE),
    "lp": (lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 2), IMAGE),
    "local_response": (lambda x: F.local_response_norm(x, 3), IMAGE),
    "adaptive_one": (lambda x: F.adaptive_avg_pool2d(x, 1) * x, IMAGE),
    "adaptive_one_channels_last": (
        lambda x: F.adaptive_avg_pool2d(x.contiguous(memory_format=torch.channels_last), 1),
        IMAGE,
    ),
    "adaptive_seven": (lambda x: F.adaptive_avg_pool2d(x, (7, 3)).flatten(1).sin(), IMAGE),
    "adaptive_max": (lambda x: F.adaptive_max_pool2d(x, (4, 3)).sin(), IMAGE),
    "adaptive_max_one": (lambda x: F.adaptive_max_pool2d(x, 1) * x, IMAGE),
    "adaptive_max_more": (lambda x: F.adaptive_max_pool2d(x, (13, 5)).square(), IMAGE),
    "adaptive_max_channels_last": (
        lambda x: F.adaptive_max_pool2d(x.contiguous(memory_format=torch.channels_last), (2, 4)),
        IMAGE,
    ),
    "adaptive_max_ties": (lambda x: F.adaptive_max_pool2d(x.round().clamp(-1, 1), (3, 2)).sin(), IMAGE),
    "adaptive_max_indices": (lambda x: F.adaptive_max_pool2d(x.detach().round(), (3, 2), True)[1], IMAGE),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2).sin(), IMAGE),
    "nearest_exact": (lambda x: F.interpolate(x, size=(5, 17), mode="nearest-exact"), IMAGE),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").sin(), IMAGE),
    "bilinear_corners": (lambda x: F.interpolate(x, size=(20, 7), mode="bilinear", align_corners=True), IMAGE),
    "bicubic": (lambda x: F.interpolate(x, size=(4, 30), mode="bicubic"), IMAGE),
    "reflect": (lambda x: F.pad(x, (3, 2, 1, 4), mode="reflect").sin(), IMAGE),
    "replicate": (lambda x: F.pad(x, (3, 2, 1, 4), mode="replicate").sin(), IMAGE),
    "circular": (lambda x: F.pad(x, (3, 2, 1, 4), mode="circular").sin(), IMAGE),
    "circular_cropped": (lambda x: F.pad(x, (-1, 3, 2, -4), mode="circular").sin(), IMAGE),
    "adaptive_more": (lambda x: F.adaptive_avg_pool2d(x, (13, 5)), IMAGE),
}
# autograd's own second derivative gathers
ONCE = {
    "lp",
    "adaptive_max",
    "adaptive_max_one",
    "adaptive_max_more",
    "adaptive_max_channels_last",
    "adaptive_max_ties",
}


def run_case(name, mesh, kwargs):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), [axis for axis, dim in enumerate(mesh[1]) if dim])
    torch.manual_seed(0)
    fn, shape = CASES[name]
    check(fn, mesh, [torch.randn(shape).double()], double=name not in ONCE, **kwargs)


@pytest.mark.parametrize("mesh", [W3, H4, HW, DATA_W], ids=["w3", "h4", "h2_w2", "data_w"])
@pytest.mark.parametrize("name", CASES)
def test_pools_and_pads_match_reference_without_a_gather(name, mesh):
    run_ranks(run_case, num_ranks(mesh), name, mesh, {})


def run_one_and_three_dims():
    torchtp.dtensor.mark(device_mesh_of((2,)), [0])
    torch.manual_seed(0)
    line, box = torch.randn(2, 3, 11).double(), torch.randn(1, 2, 7, 6, 9).double()
    check(lambda x: F.max_pool1d(x, 3, 2, 1).square(), ((2,), (2,)), [line])
    check(lambda x: F.max_pool1d(x.detach(), 3, 2, 1), ((2,), (2,)), [line])
    check(lambda x: F.adaptive_max_pool1d(x, 4).sin(), ((2,), (2,)), [line], double=False)
    check(lambda x: F.avg_pool1d(x, 3, 2, 1), ((2,), (2,)), [line])
    check(lambda x: F.adaptive_avg_pool1d(x, 4), ((2,), (2,)), [line])
    for dim in (2, 4):
        check(lambda x: F.max_pool3d(x, 3, 2, 1).square(), ((2,), (dim,)), [box])
        check(lambda x: F.adaptive_max_pool3d(x, (3, 2, 4)).sin(), ((2,), (dim,)), [box], double=False)
        check(lambda x: F.avg_pool3d(x, 3, 2, 1), ((2,), (dim,)), [box])
        check(lambda x: F.adaptive_avg_pool3d(x, (3, 2, 4)), ((2,), (dim,)), [box])


def test_pools_in_one_and_three_dims_match_reference():
    run_ranks(run_one_and_three_dims, 2)


def run_one_image_and_none():
    """Without a dim for the images, and with no images."""
    torchtp.dtensor.mark(device_mesh_of((3,)), [0])
    torch.manual_seed(0)
    pools = (
        lambda x: F.max_pool2d(x.square(), 3, 2, 1),
        lambda x: F.avg_pool2d(x.square(), 3, 2, 1),
        lambda x: F.adaptive_avg_pool2d(x.square(), (3, 5)),
        lambda x: F.adaptive_max_pool2d(x.square(), (3, 5)),
    )
    for pool in pools:
        for dim in (1, 2):
            check(pool, ((3,), (dim,)), [torch.randn(4, 9, 7).double()], double=False)
        check(pool, ((3,), (2,)), [torch.randn(0, 4, 9, 7).double()], double=False)
    check(lambda x: F.avg_pool1d(x.square(), 3), ((3,), (2,)), [torch.randn(0, 4, 9).double()], double=False)


def test_pools_of_one_image_and_of_none_match_reference():
    run_ranks(run_one_image_and_none, 3)


def run_second_derivative():
    torch.manual_seed(0)
    with_indices = lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[0].square()  # noqa: E731
    check(with_indices, ((2,), (3,)), [torch.randn(IMAGE).double()], gathers=True)
    check(lambda x: F.adaptive_max_pool2d(x, 3).square(), ((2,), (3,)), [torch.randn(IMAGE).double()], gathers=True)


def test_gathering_pools_match_reference():
    run_ranks(run_second_derivative, 2)


def run_on_one_channel():
    """Cut along rows and channels: two ranks have none, and no image that ATen pools."""
    torch.manual_seed(0)
    for name in ("max", "max_stem", "max_ceil_dilated", "avg", "avg_padded", "adaptive_one"):
        check(CASES[name][0], ((2, 2), (2, 1)), [torch.randn(2, 1, 9, 11).double()])


def test_ranks_without_channels_pool_nothing():
    run_ranks(run_on_one_channel, 4)


def run_refused():
    mesh = device_mesh_of((2,))
    torchtp.dtensor.mark(mesh, [0])
    cut = distribute_tensor(torch.randn(IMAGE), mesh, [Shard(3)], src_data_rank=None)
    for pool in (
        lambda x: F.max_pool2d(x, 0, 1),
        lambda x: F.max_pool2d(x, 2, 2, dilation=0),
        lambda x: F.avg_pool2d(x, 0, 1),
        lambda x: torch.ops.aten.max_pool2d_with_indices(x, [2, 2], [0, 0]),
        lambda x: torch.ops.aten.avg_pool2d(x, [2, 2], [0, 1]),
    ):
        with pytest.raises(ValueError, match="kernel_size, stride and dilation must be positive, got"):
            pool(cut)


def test_windows_without_steps_are_refused():
    run_ranks(run_refused, 2)
