"""Random graphs of cut tensors, parameters, buffers and what is made of them, with people's own Functions, hooks and gradients inside."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from random_graphs import CHANNELS, WAYS, Call, RandomGraph
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class Rounded(torch.autograd.Function):
    """Straight through, but for large gradients, of which a sum is not that of the parts'."""

    @staticmethod
    def forward(ctx, x):
        return (x * 2).round() / 2

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.05, 0.05)


class Pair(torch.autograd.Function):
    """Two results of two tensors."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y.mean()

    @staticmethod
    def backward(ctx, of_product, of_sum):
        x, y = ctx.saved_tensors
        of_x = (of_product * y + of_sum).sum_to_size(x.shape)
        return of_x, (of_product * x).sum_to_size(y.shape) + of_sum.sum() / y.numel()


def _hooked(t: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    t = t * 1.1
    if t.requires_grad:
        t.register_hook(hook)
    return t


def _without_gradients(t: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        z = t * other
    return z + t


def _descended(t: Tensor, along: Tensor, other: Tensor) -> Tensor:
    if not along.requires_grad:
        return t * 1
    (slope,) = torch.autograd.grad((t * other).tanh().square().sum(), along, create_graph=True, allow_unused=True)
    return along * 1 if slope is None else along - 0.1 * slope


def _written(z: Tensor, t: Tensor, other: Tensor) -> Tensor:
    z[:, :, ::2] = other.mean()
    z[:, :, 1:3] = t[:, :, 1:3]
    z += other.mean()
    return z


def _accumulated(t: Tensor, other: Tensor) -> Tensor:
    total = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    for _ in range(2):
        total += t * other
    return total


def of_mixtures(draw: random.Random, t: Tensor) -> Call:
    born = lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device)  # noqa: E731
    return draw.choice([
        lambda t, _: Sine.apply(t),
        lambda t, _: Rounded.apply(t),
        lambda t, other: sum(Pair.apply(t, other)),
        lambda t, _: _hooked(t, lambda grad: grad * 2),
        lambda t, _: _hooked(t, lambda grad: grad.clamp(-0.02, 0.02)),
        lambda t, _: _hooked(t, lambda grad: grad - grad.mean()),
        lambda t, _: _hooked(t, lambda grad: grad.sign() * 0.01),
        lambda t, other: checkpoint(lambda a, b: (a * b).tanh() + a.mean(), t, other, use_reentrant=False),
        _without_gradients,
        lambda t, other: _descended(t, t, other),
        lambda t, other: _descended(t, other, other),
        lambda t, other: _written(born(t), t, other),
        _accumulated,
        lambda t, other: t.detach() * other,
        lambda t, other: born(t) + other.mean(),
        lambda t, other: torch.ones_like(t) * other,
        lambda t, other: t.new_zeros(t.shape) + t,
        lambda t, other: t * float(other.detach().mean()),
        lambda t, other: t.clone().add_(other),
        lambda t, other: (t * 1).copy_(other),
        lambda t, other: torch.stack([t, other]).mean(0),
    ])  # fmt: skip


class RandomMixture(RandomGraph):
    """Begins with more than what is made of the image."""

    def make_parts(self, image: Tensor) -> None:
        super().make_parts(image)
        extents = image.shape[-2:]
        self.map = nn.Parameter(torch.randn(1, CHANNELS, *extents).to(image))
        self.scale = nn.Parameter(torch.tensor(0.7).to(image))
        self.mix = nn.Conv2d(CHANNELS, CHANNELS, 1).to(image)
        self.rows: Tensor
        self.register_buffer("rows", torch.randn(1, CHANNELS, extents[0], 1).to(image))

    def ways(self) -> dict[Callable[[random.Random, Tensor], Call], int]:
        return {**WAYS, of_mixtures: 25}

    def begin(self, image: Tensor) -> list[Tensor]:
        places = torch.linspace(-1, 1, image.size(-1), dtype=image.dtype, device=image.device)
        made = [self.map * 1.0, self.map, self.rows * self.scale, places, self.mix(self.map), self.scale * 2]
        return [*super().begin(image), *made]


def random_mixture(seed: int) -> tuple[nn.Module, Tensor]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    image = torch.randn(2, 2, draw.randint(5, 12), draw.randint(5, 12), dtype=torch.float64)
    return RandomMixture(draw, image), image
