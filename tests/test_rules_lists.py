"""What writes into cut tensors other than by a method of theirs: ops on lists, optimizers and clipping of cut leaves, `out=`."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import make_layout
from torch import nn

import torchtp
from torchtp.testing import run_ranks


def _leaf(x):
    leaf = x.clone().requires_grad_()
    leaf.grad = x.sin()
    return leaf


def _stepped(x, optimizer, **options):
    leaf = _leaf(x)
    optimizer = optimizer([leaf], lr=0.1, **options)
    for _ in range(2):
        optimizer.step()
    return leaf.detach()


def _clipped(x, **options):
    leaf = _leaf(x)
    norm = nn.utils.clip_grad_norm_([leaf], 0.5, **options)
    nn.utils.clip_grad_value_([leaf], 0.02)
    return leaf.grad, norm


def _lists(x):
    a, b = x.clone(), x.clone()
    torch._foreach_mul_([a, b], 2.0)
    torch._foreach_add_([a, b], [x, a], alpha=3)
    torch._foreach_lerp_([a], [b], 0.25)
    torch._foreach_addcdiv_([a], [x], [x.abs() + 1], 0.5)
    torch._foreach_clamp_max_([b], 0.7)
    return (a, b, *torch._foreach_norm([a, b]), *torch._foreach_exp([a, b]))


def _list_of_parts(x):
    x = x.clone()
    torch._foreach_add_([x[:, 1], x[..., 2:9]], 1.0)
    torch._foreach_mul_([x[..., 3:8]], [x[..., 2:7].clone()])
    return x


def _part_of_a_list(x):
    x = x.clone()
    part = x[..., 2:9]
    torch._foreach_mul_([x], 2.0)
    return part.clone()


def _out_is_a_part(x):
    x = x.clone()
    torch.mul(x[..., 0:3], 2, out=x[..., 4:7])
    torch.add(x[..., 0], x[..., 3], out=x[..., 5])
    torch.add(x[:, :, 0], x[:, :, 3], out=x[:, :, 5])
    return x


def _part_of_out(x):
    x = x.clone()
    part, flat = x[..., 2:9], x.flatten(2)
    torch.mul(x, 2, out=x)
    return part.clone(), flat.clone()


def _out_upstream(x):
    """Into a part, and into what has one."""
    y = x.clone()
    torch.exp(x[..., 0:3], out=y[..., 4:7])
    z = torch.zeros_like(x)
    part = z[..., 1:4]
    torch.sigmoid(x, out=z)
    return y, z, part


LOCAL = {
    "lists": _lists,
    "a list of parts": _list_of_parts,
    "a part of what is in a list": _part_of_a_list,
    "clip": _clipped,
    "clip, foreach": lambda x: _clipped(x, foreach=True),
    "SGD": lambda x: _stepped(x, torch.optim.SGD, momentum=0.9),
    "SGD, foreach": lambda x: _stepped(x, torch.optim.SGD, momentum=0.9, foreach=True),
    "Adam, foreach": lambda x: _stepped(x, torch.optim.Adam, foreach=True),
    "AdamW, foreach": lambda x: _stepped(x, torch.optim.AdamW, foreach=True, amsgrad=True),
    "RMSprop, foreach": lambda x: _stepped(x, torch.optim.RMSprop, foreach=True),
    "out of an op that upstream does": _out_upstream,
}
GATHERED = {
    "AdamW, fused": lambda x: _stepped(x, torch.optim.AdamW, fused=True),
    "out is a part": _out_is_a_part,
    "a part of out": _part_of_out,
}


def _wrong(axes):
    layout = make_layout(axes)
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    wrong = []
    for cases in (LOCAL, GATHERED):
        for name, case in cases.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if cases is GATHERED else "error", torchtp.GatherWarning)
                got = case(layout.shard(x))
            expected = case(x)
            pairs = zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]
            if not all(torch.allclose(mine.full_tensor(), reference) for reference, mine in pairs):
                wrong.append(name)
    return wrong


@pytest.mark.parametrize("axes", [{"w": 3}, {"h": 2, "w": 2}], ids=str)
def test_writes_reach_cut_tensors_and_their_parts(axes):
    num_ranks = 4 if len(axes) == 2 else next(iter(axes.values()))
    assert run_ranks(_wrong, num_ranks, axes, timeout=120) == [[]] * num_ranks
