"""Points picked out of cut DTensors by lists of numbers or masks, put into them or added there, equal the single device, without a gather."""

from __future__ import annotations

import math

import pytest
import torch
from rules import H4, HW, W3, check, device_mesh_of, num_ranks
from torch.distributed.tensor import Shard, distribute_tensor

import torchtp
from torchtp.testing import run_ranks

IMAGE = (2, 4, 9, 11)
TOKENS = (2, 9, 5)


def numbers(*shape, below, seed=0):
    return torch.randint(-below, below, shape, generator=torch.Generator().manual_seed(seed))


IMAGES = numbers(17, below=2)
CHANNELS = numbers(17, below=4, seed=1)
ROWS = numbers(17, below=9, seed=2)
COLUMNS = numbers(17, below=11, seed=3)


def put(x, values, *indices, accumulate=False):
    return torch.ops.aten.index_put(x, list(indices), values, accumulate)


def written(x, values):
    y = x.sin()
    y[IMAGES[:3], :, torch.tensor([0, 3, 8]), torch.tensor([10, 0, 4])] = values
    y[:, :, torch.tensor([2, 5])] *= 2
    return y.cos()


def write_by_mask(x):
    y = x.sin()
    far = x.detach() > 0.5
    y[far] = y[far].square()
    y[x.detach() < -1] = 0.5
    y[:, 1:3][far[:, 1:3]] *= 3
    return y.cos()


CASES = {
    "rows": (lambda x: x[:, :, ROWS].sin() * 2, [IMAGE]),
    "columns": (lambda x: x[..., COLUMNS].sin(), [IMAGE]),
    "other order": (lambda x: x[:, :, torch.tensor([3, 1, 0, 2, 8, 7, 6, 5, 4])][..., torch.arange(11).flip(0)] * x, [IMAGE]),
    "points": (lambda x: x[IMAGES, :, ROWS, COLUMNS].sin(), [IMAGE]),
    "points of channels": (lambda x: x[:, CHANNELS, ROWS, COLUMNS].sin(), [IMAGE]),
    "points of all dims": (lambda x: x[IMAGES, CHANNELS, ROWS, COLUMNS].sin(), [IMAGE]),
    "apart": (lambda x: x[IMAGES, :, :, COLUMNS].sin(), [IMAGE]),
    "rows apart": (lambda x: x[IMAGES, :, ROWS].sin(), [IMAGE]),
    "broadcast": (lambda x: x[torch.arange(2)[:, None], :, ROWS[:5], COLUMNS[:5]].sin(), [IMAGE]),
    "box": (lambda x: x[:, :, ROWS[:3, None], COLUMNS[:4]].sin(), [IMAGE]),
    "images and channels": (lambda x: x[IMAGES[:5], CHANNELS[:5]].sin(), [IMAGE]),
    "one point": (lambda x: x[:, :, torch.tensor([4]), torch.tensor([7])].sin(), [IMAGE]),
    "no point": (lambda x: x.sum() + x[:, :, torch.tensor([], dtype=torch.long)].sum(), [IMAGE]),
    "int32": (lambda x: x[..., COLUMNS.int()].sin(), [IMAGE]),
    "index_select": (lambda x: x.index_select(2, ROWS % 9).index_select(-1, COLUMNS % 11).sin(), [IMAGE]),
    "tokens": (lambda x: x[torch.arange(2)[:, None], numbers(2, 6, below=9)].sin(), [TOKENS]),
    "kept tokens": (lambda x: x[:, torch.tensor([0, 2, 3, 7])].sin(), [TOKENS]),
    "mask": (lambda x: x[:, :, torch.arange(99).view(9, 11) % 7 == 0].sin(), [IMAGE]),
    "mask of rows": (lambda x: x[:, :, torch.arange(9) % 2 == 0].sin(), [IMAGE]),
    "cut mask": (lambda x: x[x.detach() > 0.3].sin() * 2, [IMAGE]),
    "cut mask of pixels": (lambda x: x.movedim(1, -1)[x.detach()[:, 0] > 0.1].sin(), [IMAGE]),
    "cut mask of one image": (lambda x: x[:, :, x.detach()[1, 2] > -0.2].sin(), [IMAGE]),
    "cut mask of channels and rows": (lambda x: x[:, x.detach()[0, :, :, 3] > 0].sin(), [IMAGE]),
    "cut mask of a volume": (lambda x: x.unflatten(1, (2, 2))[x.detach().unflatten(1, (2, 2)) < 0].square(), [IMAGE]),
    "cut mask, true nowhere": (lambda x: x.sum() + x[x.detach() > 99].sum(), [IMAGE]),
    "cut mask, true everywhere": (lambda x: x[x.detach() < 99].sin(), [IMAGE]),
    "cut mask in part of the image": (lambda x: x[(x.detach() > 0) & (torch.arange(11) < 3)].sin(), [IMAGE]),
    "put by cut mask": (lambda x, y: put(x.sin(), y.cos()[y.detach() > 0], y.detach() > 0).sin(), [IMAGE, IMAGE]),
    "add by cut mask": (lambda x, y: put(x.sin(), y.cos()[y.detach() > 0], y.detach() > 0, accumulate=True).sin(), [IMAGE, IMAGE]),
    "write by cut mask": (write_by_mask, [IMAGE]),
    "masked_select": (lambda x: x.masked_select(x.detach() > 0).sin(), [IMAGE]),
    "masked_select of pixels": (lambda x: x.masked_select(x.detach()[:, :1] > 0).sin(), [IMAGE]),
    "masked_scatter": (lambda x, y: x.sin().masked_scatter(y.detach() > 0, y.cos()).sin(), [IMAGE, IMAGE]),
    "put": (lambda x, y: put(x.sin(), y, None, None, torch.tensor([3, 0])).sin(), [IMAGE, (2, 4, 2, 11)]),
    "put points": (lambda x, y: put(x.sin(), y.cos(), torch.tensor([0, 1, 1]), None, torch.tensor([3, 0, 8]), torch.tensor([3, 1, -1])).sin(), [IMAGE, (3, 4)]),
    "add points": (lambda x, y: put(x.sin(), y.cos(), IMAGES, None, ROWS, COLUMNS, accumulate=True).sin(), [IMAGE, (17, 4)]),
    "add rows": (lambda x, y: put(x.sin(), y.cos(), None, None, ROWS, accumulate=True).sin(), [IMAGE, (2, 4, 17, 11)]),
    "add one": (lambda x, y: put(x.sin(), y[0, 0], None, None, ROWS, COLUMNS, accumulate=True).sin(), [IMAGE, (17, 4)]),
    "index_copy": (lambda x, y: x.sin().index_copy(2, torch.tensor([7, 2, 0]), y.cos()).sin(), [IMAGE, (2, 4, 3, 11)]),
    "index_copy in place": (lambda x, y: x.sin().index_copy_(3, torch.tensor([3, 10]), y.cos()).sin(), [IMAGE, (2, 4, 9, 2)]),
    "index_copy of channels": (lambda x: x.sin().index_copy(1, torch.tensor([3, 0]), x[:, 1:3].cos()).sin(), [IMAGE]),
    "index_fill": (lambda x: x.sin().index_fill(2, torch.tensor([8, 1]), 0.5).sin(), [IMAGE]),
    "index_fill in place": (lambda x: x.sin().index_fill_(-1, torch.tensor(4), -2).sin(), [IMAGE]),
    "index_fill by a tensor": (lambda x, y: x.sin().index_fill(1, torch.tensor([2, 0]), y.sum()).sin(), [IMAGE, IMAGE]),
    "index_add": (lambda x, y: x.sin().index_add(2, ROWS % 9, y.cos(), alpha=2).sin(), [IMAGE, (2, 4, 17, 11)]),
    "write": (written, [IMAGE, (3, 4)]),
}  # fmt: skip


def _compare(name, mesh):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), range(len(mesh[0])))
    fn, shapes = CASES[name]
    inputs = [
        torch.randn(shape, generator=torch.Generator().manual_seed(7 + i)).double() for i, shape in enumerate(shapes)
    ]
    check(fn, mesh, inputs)


def masked_by_token(x, token):
    y = x.sin()
    y[:, torch.tensor([0, 2, 3, 7])] = token
    y[torch.arange(2)[:, None], numbers(2, 3, below=9)] = token[None]
    y[numbers(2, 9, below=3) > 0] = token
    return y.cos()


def reduced(x, table, how, **kwargs):
    """The last row of the table gets nothing."""
    index = (numbers(99, below=6) % 6).expand(2, 4, 99)
    return table.scatter_reduce(2, index, x.flatten(2).cos(), how, **kwargs).sin()


ADDED = {  # rows of a cut image to a whole table: the shape of the table, and what is made of both
    "index_add": ((2, 2, 4, 11), lambda x, table: table.sin().index_add(0, ROWS[:9] % 2, x.movedim(2, 0).cos(), alpha=2).sin()),
    "index_add of pixels": ((2, 4, 7), lambda x, table: table.index_add(2, numbers(99, below=7) % 7, x.flatten(2).cos()).sin()),
    "index_put": ((2, 4, 5, 7), lambda x, table: put(table, x.flatten(2).sin(), None, None, numbers(99, below=5), numbers(99, below=7), accumulate=True).sin()),
    "in place": ((2, 4, 7), lambda x, table: x.sum() * torch.zeros(2, 4, 7).double().index_add_(2, numbers(99, below=7) % 7, x.flatten(2).cos()).sin() * table),
    "by cut numbers": ((6, 4), lambda x, table: table.index_add(0, (x[0, 0] * 3).long().remainder(6).flatten(), x[1].flatten(1).t().cos()).sin()),
    "scatter_add": ((2, 4, 7), lambda x, table: table.scatter_add(2, (numbers(99, below=7) % 7).expand(2, 4, 99), x.flatten(2).cos()).sin()),
    "mean": ((2, 4, 7), lambda x, table: reduced(x, table, "mean")),
    "mean of some": ((2, 4, 7), lambda x, table: reduced(x, table, "mean", include_self=False)),
    "sum of some": ((2, 4, 7), lambda x, table: reduced(x, table, "sum", include_self=False)),
}  # fmt: skip
PALETTE = torch.linspace(-1, 1, 20).double().view(4, 5)


def _compare_with_parameters(name, mesh):
    torchtp.dtensor.mark(device_mesh_of(mesh[0]), range(len(mesh[0])))
    x = torch.randn(2, 4, 9, 11, generator=torch.Generator().manual_seed(7)).double()
    if name == "token":
        tokens = x.transpose(1, 3)[:, :, :, 0].contiguous()  # 2, 11, 9
        tokens_mesh = (mesh[0], (1, *[None] * (len(mesh[0]) - 1)))
        check(lambda x, token: masked_by_token(x[:, :9], token), tokens_mesh, [tokens], [x[0, 0, 0, :9].clone()])
    elif name == "looked up":
        labels = (x * 10).long().remainder(4)
        check(lambda x, labels, table: table[labels[:, 0]].movedim(-1, 1) * x[:, :1], mesh, [x, labels], [PALETTE])
    elif name == "weighed":
        labels = (x * 10).long().remainder(4)
        check(lambda x, labels, table: x * table[:, labels].sin().sum(0), mesh, [x, labels], [PALETTE.t().contiguous()])
    else:
        shape, fn = ADDED[name]
        check(
            fn,
            mesh,
            [x],
            [torch.linspace(-1, 1, math.prod(shape)).double().view(shape)],
            double=name not in ("in place", "by cut numbers"),
        )


@pytest.mark.parametrize("mesh", [W3, H4, HW], ids=["w3", "h4", "h2w2"])
@pytest.mark.parametrize("name", ["token", "looked up", "weighed", *ADDED])
def test_parameters_that_meet_points_get_their_gradients(name, mesh):
    run_ranks(_compare_with_parameters, num_ranks(mesh), name, mesh)


@pytest.mark.parametrize("mesh", [W3, H4, HW], ids=["w3", "h4", "h2w2"])
@pytest.mark.parametrize("name", CASES)
def test_points_equal_the_single_device(name, mesh):
    run_ranks(_compare, num_ranks(mesh), name, mesh)


def _stays_cut():
    mesh = device_mesh_of((2, 2))
    torchtp.dtensor.mark(mesh, [0, 1])
    x = distribute_tensor(torch.rand(IMAGE), mesh, [Shard(2), Shard(3)]).requires_grad_()
    points = x[IMAGES, :, ROWS, COLUMNS]
    assert all(placement.is_replicate() for placement in points.placements), "a short list is whole"
    (grad,) = torch.autograd.grad(points.square().sum(), x)
    assert grad.placements == x.placements
    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 2 with size 9"):
        x[:, :, torch.tensor([0, 9, 1])]
    with pytest.raises(IndexError, match="shape mismatch"):
        x[torch.arange(2), :, torch.arange(3)]
    many = x[:, :, torch.arange(9).repeat(2000)]
    assert many.placements == x.placements


def test_few_points_are_whole_and_their_gradients_cut():
    run_ranks(_stays_cut, 4)
