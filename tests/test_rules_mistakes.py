"""What PyTorch refuses of a whole tensor is refused of a cut one, on all ranks alike; nothing hangs, nothing is guessed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from rules import device_mesh_of
from torch.distributed.tensor import Shard, distribute_tensor

import torchtp
from torchtp.testing import run_ranks

SHAPE = (2, 3, 8, 10)


def _one_wrong(shape, value):
    """Zeros but for the last element, which one rank has."""
    values = torch.zeros(shape, dtype=torch.long)
    values.view(-1)[-1] = value
    return values


# Of an image of that shape.
MISTAKES = [
    lambda x: x.sum(7),
    lambda x: x.mean((-9, 2)),
    lambda x: x.softmax(5),
    lambda x: torch.cat([x, x[..., :9]], 1),
    lambda x: torch.cat([x, x], 9),
    lambda x: torch.stack([x, x[..., :9]]),
    lambda x: torch.stack([x, x], 7),
    lambda x: x.copy_(torch.ones(2, 3, 8, 9)),
    lambda x: x.copy_(torch.ones(1, 2, 3, 8, 10)),
    lambda x: x.add_(torch.ones(5, 2, 3, 8, 10)),
    lambda x: x.select(3, 99),
    lambda x: x.select(7, 0),
    lambda x: torch.ops.aten.slice(x, 7, 0, 3),
    lambda x: x.unfold(7, 2, 1),
    lambda x: x.unfold(3, 20, 1),
    lambda x: x.split(3, 9),
    lambda x: x.split([3, 3], 3),
    lambda x: x.split(-1, 3),
    lambda x: x.rot90(4, (3, -1)),
    lambda x: x.chunk(2, 9),
    lambda x: x.narrow(3, 8, 5),
    lambda x: x.flip(9),
    lambda x: x.roll(1, 9),
    lambda x: x.unsqueeze(9),
    lambda x: x.squeeze(9),
    lambda x: x.permute(0, 1, 2),
    lambda x: x.transpose(1, 9),
    lambda x: x.cumsum(9),
    lambda x: x.gather(9, torch.zeros(2, 3, 8, 10, dtype=torch.long)),
    lambda x: x.index_select(9, torch.tensor([0])),
    lambda x: x.index_select(3, torch.tensor([99])),
    lambda x: x.view(7, 7),
    lambda x: x.reshape(-1, 7),
    lambda x: x.expand(5, 3, 8, 10),
    lambda x: x.max(9),
    lambda x: x.argmax(9),
    lambda x: x.topk(3, 9),
    lambda x: x.topk(30, 3),
    lambda x: x.var(9),
    lambda x: x.norm(dim=9),
    lambda x: x.sort(9),
    lambda x: x + torch.ones(9),
    lambda x: x * x[..., :3],
    lambda x: F.conv2d(x, torch.rand(4, 2, 3, 3)),
    lambda x: F.conv2d(x, torch.rand(4, 3, 30, 30)),
    lambda x: F.conv2d(x, torch.rand(4, 3, 9, 10)),
    lambda x: F.conv_transpose2d(x, torch.rand(3, 4, 3, 3), output_padding=1),
    lambda x: F.conv_transpose2d(x, torch.rand(3, 4, 3, 3), output_padding=(0, 2), stride=2),
    lambda x: F.conv2d(x, torch.rand(4, 3, 3, 3), torch.rand(5)),
    lambda x: F.conv2d(x, torch.rand(4, 3, 3, 3), dilation=0),
    lambda x: F.conv2d(x, torch.rand(4, 3, 3, 3), groups=2),
    lambda x: F.max_pool2d(x, 3, padding=2),
    lambda x: F.max_pool2d(x, 30),
    lambda x: F.avg_pool2d(x, 30),
    lambda x: F.avg_pool3d(x.unsqueeze(2), (1, 9, 10), 4, (0, 1, 5)),
    lambda x: F.avg_pool3d(x.unsqueeze(2), (1, 3, 11), 4, (0, 1, 1)),
    lambda x: F.adaptive_avg_pool2d(x, (0, -1)),
    lambda x: F.adaptive_max_pool2d(x[..., :1], (1, -1)),  # one rank has no columns
    lambda x: F.channel_shuffle(x[..., :1], 2),
    lambda x: F.pad(x, (20, 20), mode="reflect"),
    lambda x: F.pad(x, (10, 0), mode="reflect"),
    lambda x: F.pad(x, (0, 12), mode="reflect"),
    lambda x: F.pad(x, (1, 1, 8, 0), mode="reflect"),
    lambda x: F.pad(x, (-6, -6), mode="replicate"),
    lambda x: F.pad(x, (-6, -6)),
    lambda x: F.pad(x, (11, 0), mode="circular"),
    lambda x: F.interpolate(x, size=(0, 0)),
    lambda x: F.interpolate(x, scale_factor=-1.0),
    lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2)),
    lambda x: F.batch_norm(x, None, None, torch.ones(2), None, True),
    lambda x: F.layer_norm(x, (11,)),
    lambda x: F.layer_norm(x, (10,), torch.ones(3)),
    lambda x: F.group_norm(x, 2),
    lambda x: F.group_norm(x, 3, torch.ones(2)),
    lambda x: F.linear(x, torch.rand(3, 11)),
    lambda x: x @ torch.rand(11, 3),
    lambda x: torch.bmm(x.flatten(0, 1), torch.rand(5, 10, 2)),
    lambda x: torch.bmm(x.flatten(0, 1), torch.rand(6, 9, 2)),
    lambda x: torch.mm(x[0, 0], torch.rand(9, 3)),
    lambda x: torch.addmm(torch.rand(3), x[0, 0], torch.rand(9, 3)),
    lambda x: torch.addmm(torch.rand(5, 8, 3), x[0, 0], torch.rand(10, 3)),
    lambda x: torch.baddbmm(torch.rand(3), x.flatten(0, 1), torch.rand(6, 9, 3)),
    lambda x: F.embedding(x.long() + 9, torch.rand(3, 2)),
    lambda x: F.one_hot(x.long() + 7, 4),
    lambda x: F.one_hot(x.long() - 1),
    lambda x: F.cross_entropy(x, torch.zeros(2, 8, 9).long()),
    lambda x: F.cross_entropy(x, torch.zeros(3, 8, 10).long()),
    lambda x: F.cross_entropy(x, torch.tensor([7] + [0] * 9).expand(2, 8, 10)),
    lambda x: F.cross_entropy(x, torch.tensor([7] + [0] * 9).expand(2, 8, 10), reduction="none"),
    lambda x: F.cross_entropy(x[:, :, 0], _one_wrong((2, 10), 3)),
    lambda x: F.cross_entropy(torch.stack([x, x], 2), _one_wrong((2, 2, 8, 10), -7)),
    lambda x: F.cross_entropy(x, torch.zeros(2, 8, 10).long(), weight=torch.ones(2)),
    lambda x: F.cross_entropy(x, torch.zeros(2, 8, 10)),
    lambda x: F.cross_entropy(x, torch.rand(2, 2, 8, 10)),
    lambda x: F.cross_entropy(x[..., :1], torch.zeros(2, 8, 1).int()),  # one rank has no rows
    lambda x: F.cross_entropy(x[..., :1], torch.zeros(2, 8, 1).long(), weight=torch.ones(2)),
    lambda x: F.cross_entropy(torch.stack([x, x], 2), _one_wrong((2, 2, 8, 10), 2), weight=torch.ones(2)),
    lambda x: F.mse_loss(x, torch.rand(2, 3, 8, 9)),
    lambda x: F.binary_cross_entropy(x + 1, x),
    lambda x: F.binary_cross_entropy(x + 2 * _one_wrong((2, 3, 8, 10), 1), x),
    lambda x: F.binary_cross_entropy_with_logits(x, torch.rand(2, 3, 8, 9)),
    lambda x: F.grid_sample(x, torch.rand(2, 4, 4, 10)),
    lambda x: F.grid_sample(x, torch.rand(3, 4, 4, 2)),
    lambda x: F.pixel_shuffle(x, 2),
    lambda x: F.pixel_unshuffle(x, 3),
    lambda x: F.unfold(x, 30),
    lambda x: F.fold(x.flatten(2), (4, 4), 2),
    lambda x: F.scaled_dot_product_attention(x, x[..., :5], x),
    lambda x: F.scaled_dot_product_attention(*[x[..., :1].mT] * 2, x[..., :2].mT),  # one rank has no queries
    lambda x: x[:, :, :, 99],
    lambda x: x[..., torch.tensor([99])],
    lambda x: x[:, torch.tensor([7])],
    lambda x: x[torch.ones(2, 3, 8, 9).bool()],
    lambda x: x.masked_fill(torch.ones(9).bool(), 0),
    lambda x: torch.where(torch.ones(9).bool(), x, x),
    lambda x: x.long() // 0,
    lambda x: x.item(),
    lambda x: x.unflatten(3, (3, 3)),
    lambda x: x.repeat(2, 2),
    lambda x: x.repeat_interleave(2, 9),
    lambda x: torch.cdist(x, torch.rand(2, 3, 8, 9)),
    lambda x: torch.einsum("nchw,ncwx->nchx", x, torch.rand(2, 3, 9, 2)),
    lambda x: x.scatter(3, torch.full((2, 3, 8, 10), 99), 1.0),
    lambda x: x.index_put((torch.tensor([9]),), torch.tensor(1.0)),
    lambda x: x.index_add(3, torch.tensor([99]), torch.ones(2, 3, 8, 1)),
    lambda x: torch.zeros(2, 3, 4, 10).index_add(2, torch.tensor([0, 1, 2, 3, 0, 1, 2, 4]), x),
    lambda x: torch.zeros(2, 3, 8, 4).index_add_(3, torch.tensor([-1, *range(4), *range(4), 0]), x),
    lambda x: torch.zeros(2, 4).scatter_add(1, _one_wrong((2, 240), 4), x.flatten(1)),
    lambda x: torch.zeros(2, 3, 8, 4).scatter_add(3, torch.arange(10).sub(1).clamp(max=3).expand(2, 3, 8, 10), x),
    lambda x: x.flatten().tril(),
    lambda x: torch.linalg.inv(x),
    lambda x: torch.linalg.cholesky(x[..., :8] - 5),
]

WRONG = 9 * _one_wrong(SHAPE, 1)
# A number of one rank alone.
MISTAKES += [
    lambda x: F.embedding(x.long() + WRONG, torch.rand(9, 2)),
    lambda x: F.embedding(x.long() - WRONG, torch.rand(9, 2)),
    lambda x: torch.rand(9, 3)[x.long() + WRONG],
    lambda x: torch.rand(3, 9)[:, x.long() + WRONG],
    lambda x: torch.rand(9).index_select(0, x[0, 0, 7].long() + WRONG[1, 2, 7]),
    lambda x: x.gather(1, x.long() + WRONG),
    lambda x: x.gather(3, x.long() + 2 * WRONG),
    lambda x: x.scatter(1, x.long() + WRONG, 1.0),
    lambda x: x.scatter(1, x.long() + WRONG, x),
    lambda x: x.scatter_(1, x.long() + WRONG, x + 1),
    lambda x: x.scatter_add(3, x.long() + 2 * WRONG, x),
    lambda x: F.max_unpool2d(x, x.long() + 999 * WRONG, 2),
    lambda x: F.binary_cross_entropy(x + WRONG, x, reduction="none"),
    lambda x: x.long() // (1 - WRONG.clamp(max=1)),
    lambda x: x.long() // (x.long() + 1 - WRONG.clamp(max=1)),
    lambda x: x.long().remainder_(x.long() + 1 - WRONG.clamp(max=1)),
    lambda x: torch.div(x.long(), x.long() + 1 - WRONG.clamp(max=1), rounding_mode="trunc"),
    lambda x: x[..., :1].long() % 0,  # one rank has no columns
    lambda x: torch.bernoulli(x + WRONG),
    lambda x: torch.normal(x, 1 - WRONG.float()),
    lambda x: torch.normal(0.0, x + 1 - WRONG),
    lambda x: torch.linalg.eig((x / (1 - WRONG.clamp(max=1)))[..., None, None]),
    lambda x: torch.linalg.inv((x + 1 - WRONG.clamp(max=1) * (x + 1))[..., None, None]),
]
# Of a dtype that does not fit, where one rank has no columns to find it by.
MISTAKES += [
    lambda x: F.conv2d(x, torch.rand(3, 3, 1, 10).double()),
    lambda x: F.conv2d(x, torch.rand(3, 3, 1, 10), torch.rand(3).double()),
    lambda x: F.conv_transpose2d(x[..., :1], torch.rand(3, 2, 1, 1).double()),
    lambda x: F.conv_transpose2d(x[..., :1].int(), torch.ones(3, 2, 1, 1).int()),
    lambda x: F.conv2d(x[..., :1].bool(), torch.ones(3, 3, 1, 1).bool()),
    lambda x: F.avg_pool2d(x.int(), (1, 10)),
    lambda x: F.avg_pool3d(x.unsqueeze(2).half(), (1, 1, 10)),
    lambda x: F.group_norm(x[..., :1].int(), 1),
    lambda x: x[..., :1].mT @ x[..., :1].double(),
    lambda x: F.unfold(x[..., :1], (9, 1)),
    lambda x: x[..., :1].long().softmax(1),
    lambda x: x.long().softmax(3),
    lambda x: x[..., :1].cfloat().softmax(1),
    lambda x: x[..., :1].cfloat().amax(1),
    lambda x: torch.aminmax(x[..., :1].cfloat(), dim=1),
    lambda x: F.adaptive_max_pool2d(x[..., :1].cfloat(), (2, 1)),
    lambda x: x[..., :1].cfloat().cummax(2),
    lambda x: x[..., :1].bool().mT @ x[..., :1].bool(),
    lambda x: F.nll_loss(x[..., :1].long(), torch.zeros(2, 8, 1).long()),
    lambda x: x.long().mean(),
    lambda x: (x > 0.5).mean((2, 3)),
    lambda x: x.long().var(3),
    lambda x: x.long().norm(),
    lambda x: F.adaptive_avg_pool2d(x.long(), 2),
]


def refused(mesh, dims, numbers):
    """Where a mistake went through, or what another rank would not have said."""
    torchtp.dtensor.mark(device_mesh_of(mesh), range(len(mesh)))
    whole = torch.rand(SHAPE)
    told = []
    for number in numbers:
        kinds = []
        for x in (whole.clone(), distribute_tensor(whole, device_mesh_of(mesh), [Shard(dim) for dim in dims])):
            try:
                MISTAKES[number](x)
                kinds.append(None)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if isinstance(error, TypeError) and kinds not in ([], [TypeError]):
                    raise  # refused so only where one device does (complex aminmax, on torch 2.15)
                kinds.append(type(error))
        told.append([kind is not None for kind in kinds])
    return told


PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("mesh", "dims"), [((2,), [3]), ((2, 2), [2, 3])], ids=["w2", "h2_w2"])
def test_mistakes_are_refused_by_all_ranks(mesh, dims, part):
    numbers = list(range(part, len(MISTAKES), PARTS))
    for told in run_ranks(refused, math.prod(mesh), mesh, dims, numbers):
        for number, (whole, cut) in zip(numbers, told, strict=True):
            assert whole and cut, (number, whole, cut)
