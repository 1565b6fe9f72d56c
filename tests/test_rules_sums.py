"""Gradients that are still to be summed over the ranks, edited as hooks and backwards of people's own do: in place, and through views."""

from __future__ import annotations

import pytest
import torch
from models import make_layout
from torch import nn

import torchtp
from torchtp.testing import run_ranks


def _in_place(edit):
    def edited(g):
        edit(g)
        return g

    return edited


def _ones(g):
    return torch.ones(g.size(0), 1, dtype=g.dtype)


def _first(g):
    return torch.zeros(g.size(0), 1, dtype=torch.long)


def _of_two_views(g):
    rows, flat = g.detach(), g.view(2, 4)
    rows[:, 0].add_(1)
    flat.mul_(2)
    rows[0].sub_(1)


VALUES = {  # of a gradient [2, 4]
    "add a number": lambda g: g.add_(1),
    "add itself": lambda g: g.add_(g),
    "add another sum": lambda g: g.add_(g * 3, alpha=2),
    "add to by a whole one": lambda g: g.add_(torch.ones_like(g)),
    "multiply by a number": lambda g: g.mul_(2),
    "multiply by itself": lambda g: g.mul_(g),
    "divide rounding": lambda g: g.div_(0.3, rounding_mode="floor"),
    "negate": lambda g: g.neg_(),
    "clamp": lambda g: g.clamp_(-1, 1),
    "zero": lambda g: g.zero_(),
    "fill": lambda g: g.fill_(2.0),
    "abs": lambda g: g.abs_(),
    "copy ones": lambda g: g.copy_(torch.ones_like(g)),
    "copy another sum": lambda g: g.copy_(2 * g),
    "copy what is turned": lambda g: g.copy_(g.flip(1)),
    "relu": torch.relu_,
    "power": lambda g: g.pow_(2),
    "lerp": lambda g: g.lerp_(torch.ones_like(g), 0.3),
    "addcmul": lambda g: g.addcmul_(g, g),
    "not a number": lambda g: g.nan_to_num_(),
    "masked fill": lambda g: g.masked_fill_(g > 0, 0.0),
    "masked scatter": lambda g: g.masked_scatter_(g > 0, torch.zeros_like(g)),
    "where negative": lambda g: g.__setitem__(g < 0, 5.0),
    "one place": lambda g: g.__setitem__((torch.tensor([0]), torch.tensor([1])), 4.0),
    "index fill": lambda g: g.index_fill_(1, torch.tensor([1, 2]), 9.0),
    "index add": lambda g: g.index_add_(1, torch.tensor([0]), _ones(g)),
    "index copy": lambda g: g.index_copy_(1, torch.tensor([0]), _ones(g)),
    "scatter": lambda g: g.scatter_(1, _first(g), 1.0),
    "scatter add": lambda g: g.scatter_add_(1, _first(g), _ones(g)),
    "cumulative": lambda g: g.cumsum_(1),
    "lower triangle": lambda g: g.tril_(),
    "turn and add": lambda g: g.t_().add_(1).t_(),
}
VIEWS = {
    "column": lambda g: g.__setitem__((slice(None), 0), 0.0),
    "row": lambda g: g[0].add_(1),
    "row into row": lambda g: g.__setitem__(1, g[0]),
    "columns": lambda g: g[:, 1:].mul_(3),
    "every second": lambda g: g[:, ::2].clamp_(0, 1),
    "all rows": lambda g: g[:].add_(3),
    "all columns": lambda g: g.narrow(1, 0, 4).add_(3),
    "halves": lambda g: g[:, :2].copy_(g[:, 2:].clone()),
    "flat": lambda g: g.flatten()[1:].add_(1),
    "three dims": lambda g: g.view(2, 2, 2)[:, 1].mul_(3),
    "other rows": lambda g: g.reshape(4, 2)[1].add_(1),
    "turned": lambda g: g.t().add_(3),
    "row of turned": lambda g: g.t()[0].add_(3),
    "permuted": lambda g: g.permute(1, 0).clamp_(0, 1),
    "wider": lambda g: g.unsqueeze(0)[:, 1].add_(3),
    "wider and back": lambda g: g.unsqueeze(0).squeeze(0).add_(3),
    "diagonal": lambda g: g.diagonal().fill_(7),
    "expanded": lambda g: g.expand_as(g).add_(1),
    "detached": lambda g: g.detach()[:, 1].add_(1),
    "data": lambda g: g.data.add_(1),
    "chunk": lambda g: g.chunk(2, 1)[1].add_(1),
    "split": lambda g: [part.add_(number) for number, part in enumerate(g.split([1, 3], 1))],
    "unbind": lambda g: g.unbind(1)[2].add_(1),
    "windows": lambda g: g.unfold(1, 2, 2)[..., 0].add_(1),
    "two views": _of_two_views,
}
MADE = {  # whatever else may be done to them
    "where": lambda g: torch.where(g > 0, g, 0 * g),
    "norm": lambda g: g / g.norm(),
    "softmax": lambda g: g.softmax(1),
    "sort": lambda g: g.sort(1)[0],
    "top": lambda g: g * (g >= g.topk(2, 1)[0][:, -1:]),
    "centered": lambda g: g - g.mean(1, keepdim=True),
    "product": lambda g: g @ g.t() @ g,
    "joined": lambda g: torch.cat([g[:, 2:], g[:, :2]], 1),
    "a number": lambda g: g * float(g[0, 0].item()),
    "a choice": lambda g: g if bool((g > 0).any()) else -g,
}
EDITS = {name: _in_place(edit) for name, edit in (VALUES | VIEWS).items()} | MADE
PLACES = {  # where such a gradient [2, 4] comes from: whole but for the sum, or cut along its last dim over the other axis
    "scale of channels": lambda x, e: x * e(x.mean((2, 3)))[:, :, None, None],
    "scale of rows": lambda x, e: x[:, :2, :4] * e(x[0, :2, :4].mean(2))[None, :, :, None],
    "scale of columns": lambda x, e: x[:, :2, :, :4] * e(x[0, :2, :, :4].mean(1))[None, :, None, :],
}


class Edited(torch.autograd.Function):
    """Edits the gradient itself, or twice as much: of its own making, as a formula has it."""

    @staticmethod
    def forward(ctx, s, edit, factor):
        ctx.edit, ctx.factor = edit, factor
        return s.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.edit(g if ctx.factor == 1 else g * ctx.factor), None, None


def _hooked(s, edit):
    s = s * 1
    s.register_hook(lambda g: edit(g.clone()))
    return s


WAYS = {
    "backward": lambda edit: lambda s: Edited.apply(s, edit, 1),
    "formula": lambda edit: lambda s: Edited.apply(s, edit, 2),
    "hook": lambda edit: lambda s: _hooked(s, edit),
}


class Net(nn.Module):
    def __init__(self, place, way, edit):
        super().__init__()
        self.place, self.edited = PLACES[place], WAYS[way](EDITS[edit])

    def forward(self, x):
        return self.place(x * 1, self.edited)


def _wrong(axes, place, way):
    layout = make_layout(axes)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 4, 8, 6, dtype=torch.float64, generator=generator)
    wrong = []
    for edit in EDITS:
        one, cut = image.clone().requires_grad_(), image.clone().requires_grad_()
        expected = Net(place, way, edit)(one)
        weights = torch.rand(expected.shape, dtype=torch.float64, generator=generator)
        (expected * weights).sum().backward()
        output = torchtp.parallelize(Net(place, way, edit), layout, output="full")(cut)
        (output * weights).sum().backward()
        if not (torch.allclose(output, expected) and torch.allclose(cut.grad, one.grad)):
            wrong.append(edit)
    return wrong


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("axes", "way"), [({"h": 2}, "backward"), *(({"h": 2, "w": 2}, way) for way in WAYS)], ids=str)
def test_edits_reach_the_sum(axes, way, place):
    num_ranks = 2 * len(axes)
    assert run_ranks(_wrong, num_ranks, axes, place, way, timeout=120) == [[]] * num_ranks
