"""Random graphs of operations on what becomes of an image: tensors of any shape, sums, views, writes into views, products, picked elements."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, _MOST_ELEMENTS, _MOST_DIMS = 4, 12000, 6

# With another tensor of the graph, of any shape.
Call = Callable[[Tensor, Tensor], Tensor]


class RandomGraph(nn.Module):
    """Some steps, each on one or two of the tensors so far; a number of each tensor."""

    def __init__(self, draw: random.Random, image: Tensor):
        super().__init__()
        self.make_parts(image)
        self.steps: list[tuple[Call, int, int]] = []
        self.noise = 0.0  # of each step, relative: what depends on rounding shows
        tensors = self.begin(image)
        for _ in range(draw.randint(3, 14)):
            self._take_step(draw, tensors)
        self.num_tensors = len(tensors)

    def make_parts(self, image: Tensor) -> None:
        self.embed, self.norm = nn.Conv2d(2, CHANNELS, 3, padding=1).to(image), nn.BatchNorm2d(CHANNELS).to(image)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.uniform_(self.norm.bias, 0.1, 0.6)  # so that no mean is nothing but rounding
        self.gain = nn.Parameter(torch.rand(CHANNELS, 1, 1).to(image) + 0.2)

    def ways(self) -> dict[Callable[[random.Random, Tensor], Call], int]:
        """Which steps there are, and how often each is taken."""
        return WAYS

    def begin(self, image: Tensor) -> list[Tensor]:
        y = self.norm(self.embed(image))
        return [y, y * self.gain]

    def _take_step(self, draw: random.Random, tensors: list[Tensor]) -> None:
        """Not one that this tensor does not take, or that makes too much of it."""
        of = draw.randrange(max(0, len(tensors) - 3) if draw.random() < 0.8 else 0, len(tensors))
        other = draw.randrange(len(tensors))
        if not tensors[of].dim():
            return
        ways = self.ways()
        (make,) = draw.choices(list(ways), list(ways.values()))
        try:
            call = make(draw, tensors[of])
            made = call(tensors[of], tensors[other])
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return
        if 0 < made.numel() <= _MOST_ELEMENTS and made.dim() <= _MOST_DIMS and made.is_floating_point():
            self.steps.append((call, of, other))
            tensors.append(made)

    def go_on(self, tensors: list[Tensor], steps: list[tuple[Call, int, int]]) -> None:
        for call, of, other in steps:
            made = call(tensors[of], tensors[other])
            tensors.append(made * (1 + self.noise * torch.rand_like(made)) if self.noise else made)

    def forward(self, image: Tensor) -> Tensor:
        tensors = self.begin(image)
        self.go_on(tensors, self.steps)
        return torch.stack([(t * t).mean() + t.mean() for t in tensors])


def of_elements(draw: random.Random, t: Tensor) -> Call:
    return draw.choice([
        lambda t, _: t.tanh(),
        lambda t, _: F.gelu(t) + F.relu(t),
        lambda t, _: t.clamp(-0.5, 0.7),
        lambda t, _: (t * t + 1).sqrt(),
        lambda t, _: t.where(t > 0, t * 2),
        lambda t, _: torch.where(t > 0.1, t, 0.0),
        lambda t, _: t.masked_fill(t > 1, 0.5),
        lambda t, _: t * t.detach(),
        lambda t, _: (t > 0).to(t.dtype) * t,
        lambda t, _: torch.atan2(t, t * t + 1),
        lambda t, _: t.contiguous(),
        lambda t, _: t.fmod(1.5) + t.round(),
        lambda t, other: t / (1 + other.abs()),
        lambda t, other: torch.where(t > other, t, other * 0.5),
        lambda t, other: torch.addcmul(t, t, other, value=0.3),
        lambda t, other: t.lerp(other, 0.3),
        lambda t, other: t.masked_fill(other > 0, 0.1),
        lambda t, other: torch.maximum(t, other * 0.9),
        lambda t, other: t.add(other),
    ])  # fmt: skip


def of_dims(draw: random.Random, t: Tensor) -> Call:
    dims = draw.sample(range(t.dim()), draw.randint(1, t.dim()))
    dim, keep, turns = dims[0], draw.random() < 0.6, draw.randint(-5, 5)
    return draw.choice([
        lambda t, _: t.sum(dims, keep),
        lambda t, _: t.mean(dims, keep),
        lambda t, _: t.amax(dims, keep),
        lambda t, _: t.logsumexp(dims, keep),
        lambda t, _: torch.linalg.vector_norm(t, 2, dims, keep),
        lambda t, _: t.var(dims, correction=0, keepdim=keep),
        lambda t, _: sum(torch.var_mean(t, dims, correction=0, keepdim=keep)),
        lambda t, _: (t - t.mean(dims, True)) / (t.var(dims, correction=0, keepdim=True) + 0.1).sqrt(),
        lambda t, _: t.softmax(dim),
        lambda t, _: t.cumsum(dim) * 0.2,
        lambda t, _: t.cummax(dim)[0],
        lambda t, _: t.logcumsumexp(dim) * 0.3,
        lambda t, _: t.max(dim, keep)[0],
        lambda t, _: t.median(dim, keep)[0],
        lambda t, _: t.argmax(dim, keep).to(t.dtype) * 0.1,
        lambda t, _: t.tanh().prod(dim, keep),
        lambda t, _: (t > 0).any(dim, keep).to(t.dtype),
        lambda t, _: (t > 0).sum(dims, keep).to(t.dtype) * 0.05,
        lambda t, _: F.normalize(t, dim=dim),
        lambda t, _: t.sort(dim)[0],
        lambda t, _: t.topk(min(2, t.size(dim)), dim)[0],
        lambda t, _: t.flip(dims),
        lambda t, _: t.roll(turns, dim),
    ])  # fmt: skip


def of_shape(draw: random.Random, t: Tensor) -> Call:
    n, dim = t.dim(), draw.randrange(t.dim())
    extent, order = t.size(dim), draw.sample(range(t.dim()), t.dim())
    first, last = sorted((draw.randrange(n), draw.randrange(n)))
    begin = draw.randrange(extent)
    length, factor = draw.randint(1, extent - begin), next((k for k in (2, 3, 5, 7) if extent % k == 0), 1)
    at, at_other = _at(dim, slice(draw.randint(0, 1), None, draw.choice([2, 3]))), draw.randrange(n)
    pads = [draw.randint(0, 2) for _ in range(2 * draw.randint(1, n))]
    mode = draw.choice(["circular", "reflect", "replicate"])
    return draw.choice([
        lambda t, _: t.permute(order),
        lambda t, _: t.flatten(first, last),
        lambda t, _: t.flatten(),
        lambda t, _: t.reshape(t.size(0), -1),
        lambda t, _: t.unflatten(dim, (factor, -1)),
        lambda t, _: t.unflatten(dim, (-1, factor)),
        lambda t, _: t.squeeze(),
        lambda t, _: t.unsqueeze(dim),
        lambda t, _: t.transpose(0, -1).contiguous(),
        lambda t, _: t.movedim(dim, at_other),
        lambda t, _: t.narrow(dim, begin, length),
        lambda t, _: t[at],
        lambda t, _: t.select(dim, begin),
        lambda t, _: t.split((extent + 1) // 2, dim)[-1],
        lambda t, _: t.chunk(3, dim)[0],
        lambda t, _: t.expand(2, *t.shape),
        lambda t, _: t.repeat_interleave(2, dim),
        lambda t, _: torch.cat([t, t.narrow(dim, begin, length)], dim),
        lambda t, _: torch.stack([t, t * 2], dim),
        lambda t, other: torch.cat([t, other], dim),
        lambda t, _: F.pad(t, pads, value=0.5),
        lambda t, _: F.pad(t, (1, 0, 2, 1)[: 2 * (n - 2)], mode=mode),
        lambda t, _: t.unfold(dim, 3, 2),
        lambda t, _: t.diagonal(0, first, last),
        lambda t, _: F.pixel_unshuffle(t[..., : t.size(-2) // 2 * 2, : t.size(-1) // 2 * 2], 2),
    ])  # fmt: skip


def of_products(draw: random.Random, t: Tensor) -> Call:
    equation = draw.choice({4: FOUR_DIMS, 3: THREE_DIMS}.get(t.dim(), ["...i,...i->..."]))
    weight = torch.linspace(-1, 1, 3 * t.size(-1)).reshape(3, -1) / t.size(-1) ** 0.5
    kernel = torch.linspace(-1, 1, 27 * t.size(1) if t.dim() > 1 else 0)
    stride = draw.choice([1, 2])
    return draw.choice([
        lambda t, _: torch.einsum(equation, *[t, t.tanh()][: equation.count(",") + 1]) * 0.1,
        lambda t, _: F.linear(t, weight.to(t)),
        lambda t, _: t @ t.mT / t.size(-1),
        lambda t, _: t.mT @ t / t.size(-2),
        lambda t, _: t.matmul(weight[0].to(t)),
        lambda t, _: t.unsqueeze(-1) * t.unsqueeze(-2),
        lambda t, _: F.scaled_dot_product_attention(t, t.tanh(), t),
        lambda t, _: F.conv2d(t, kernel.view(3, -1, 3, 3).to(t), padding=1, stride=stride) * 0.1,
        lambda t, _: F.cosine_similarity(t, t.roll(1, 0) + 0.1, dim=-1),
    ])  # fmt: skip


FOUR_DIMS = ["bchw,bdhw->bcd", "bchw,bchv->bhwv", "bchw,bcgw->bhgw", "bchw,bchw->bhw", "bchw,bdhw->hcd"]
THREE_DIMS = ["bnc,bmc->bnm", "bnc,bnd->bcd", "bnc,bnc->bn", "bnc,bnc->nc"]


def of_images(draw: random.Random, t: Tensor) -> Call:
    size, scale, ceil = (draw.randint(3, 15), draw.randint(3, 15)), draw.choice([0.5, 1.5, 2]), draw.random() < 0.5
    mode = draw.choice(["nearest", "bilinear", "bicubic", "area"])
    padding = draw.choice(["zeros", "border", "reflection"])
    return draw.choice([
        lambda t, _: F.avg_pool2d(t, 3, 2, 1),
        lambda t, _: F.max_pool2d(t, 2, 2, ceil_mode=ceil),
        lambda t, _: F.adaptive_avg_pool2d(t, (2, 5)),
        lambda t, _: F.adaptive_max_pool2d(t, 3),
        lambda t, _: F.interpolate(t, size, mode=mode),
        lambda t, _: F.interpolate(t, scale_factor=scale, mode="bilinear", align_corners=ceil),
        lambda t, other: F.interpolate(t, size=other.shape[-2:], mode="bilinear"),
        lambda t, _: F.grid_sample(t, torch.stack([t[:, 0], t[:, -1]], -1), "bilinear", padding, align_corners=ceil),
        lambda t, _: F.unfold(t, 3, padding=1),
        lambda t, _: F.fold(F.unfold(t, 2, stride=2), [n // 2 * 2 for n in t.shape[-2:]], 2, stride=2),
        lambda t, _: F.group_norm(t, t.size(1)),
        lambda t, _: F.layer_norm(t.permute(0, 2, 3, 1), (t.size(1),)),
        lambda t, _: t[..., 1:-1, 1:-1] - (t[..., 2:, 1:-1] + t[..., 1:-1, :-2]) / 2,
    ])  # fmt: skip


def of_writes(draw: random.Random, t: Tensor) -> Call:
    dim = draw.randrange(t.dim())
    extent = t.size(dim)
    row = draw.randrange(extent)
    part, steps = _at(dim, slice(extent // 3, None)), _at(dim, slice(None, None, 2))
    write: Callable[[Tensor, Tensor], object] = draw.choice([
        lambda y, t: y.mul_(1.5).add_(0.1),
        lambda y, t: y.sub_(y.mean()),
        lambda y, t: y.select(dim, row).fill_(0.3),
        lambda y, t: y.__setitem__(part, 0.2),
        lambda y, t: y.__setitem__(part, t[part] * 2),
        lambda y, t: y[steps].mul_(0.5),
        lambda y, t: y.__setitem__(y > 0.5, 0.1),
        lambda y, t: y.transpose(0, -1).mul_(0.7),
        lambda y, t: y.permute(*range(y.dim() - 1, -1, -1))[0].add_(1),
        lambda y, t: y.view(y.size(0), -1).add_(t.reshape(t.size(0), -1).mean(1, keepdim=True)),
        lambda y, t: y.narrow(dim, 0, 1).copy_(t.narrow(dim, extent - 1, 1)),
        lambda y, t: y.__setitem__(0, 0.0),
        lambda y, t: [y.narrow(dim, number, 1).add_(number) for number in range(min(2, extent))],
        lambda y, t: y.index_add_(dim, torch.tensor([0, row]).to(t.device), t.narrow(dim, 0, 2).clone()),
    ])  # fmt: skip

    def written(t: Tensor, _: Tensor) -> Tensor:
        y = t.clone()
        write(y, t)
        return y

    return written


def of_indices(draw: random.Random, t: Tensor) -> Call:
    dim, other_dim = draw.randrange(t.dim()), draw.randrange(t.dim())
    rows, others = ([draw.randrange(t.size(d)) for _ in range(3)] for d in (dim, other_dim))
    even = torch.arange(t.size(dim)) % 2 == 0
    both = list(_at(dim, torch.tensor(rows))) + [slice(None)] * t.dim()
    both[other_dim] = torch.tensor(others)
    return draw.choice([
        lambda t, _: t.index_select(dim, torch.tensor(rows).to(t.device)),
        lambda t, _: t[_at(dim, rows)],
        lambda t, _: t[tuple(both[: t.dim()])],
        lambda t, _: t[_at(dim, even)],
        lambda t, _: t.gather(dim, t.argsort(stable=True, dim=dim)),
        lambda t, _: t.take_along_dim(t.argmax(dim, keepdim=True), dim),
        lambda t, _: t[t.detach() > 0].sum() + t,
        lambda t, _: torch.where((t > 0).any(dim, keepdim=True), t, -t),
        lambda t, _: F.embedding((t.detach() > 0).long(), torch.linspace(-1, 1, 6).view(2, 3).to(t)),
    ])  # fmt: skip


def _at(dim: int, index: object) -> tuple[object, ...]:
    return (*[slice(None)] * dim, index)


WAYS: dict[Callable[[random.Random, Tensor], Call], int] = {
    of_elements: 7, of_dims: 4, of_shape: 9, of_products: 3, of_images: 5, of_writes: 4, of_indices: 3,
}  # fmt: skip


def random_graph(seed: int) -> tuple[nn.Module, Tensor]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    size = [draw.randint(6, 15) for _ in range(2)] if draw.random() < 0.6 else [draw.choice([8, 12]) for _ in range(2)]
    image = torch.randn(draw.choice([1, 2, 3]), 2, *size, dtype=torch.float64)
    return RandomGraph(draw, image), image
