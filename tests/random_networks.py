"""Random sequences of layers on images of random sizes, down to one row: what networks are made of, in orders that nobody chose."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MOST_ELEMENTS, _MOST_CHANNELS = 40000, 40


class Call(nn.Module):
    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


def attention(x: Tensor, qkv: nn.Module, out: nn.Module) -> Tensor:
    """As vision transformers write it."""
    n, c, h, w = x.shape
    tokens = x.flatten(2).transpose(1, 2)
    q, k, v = qkv(tokens).reshape(n, h * w, 3, 1, c).permute(2, 0, 3, 1, 4).unbind(0)
    made = out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, c))
    return x + made.transpose(1, 2).reshape(n, c, h, w)


def attention_of_places(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """As segmentation networks write it, by products."""
    n, c, h, w = x.shape
    scores = torch.bmm(q(x).flatten(2).permute(0, 2, 1), k(x).flatten(2)).softmax(-1)
    return x + torch.bmm(v(x).flatten(2), scores.permute(0, 2, 1)).view(n, c, h, w)


def attention_of_channels(x: Tensor) -> Tensor:
    flat = x.flatten(2)
    energy = torch.bmm(flat, flat.permute(0, 2, 1))
    return torch.bmm((energy.max(-1, keepdim=True)[0].expand_as(energy) - energy).softmax(-1), flat).view(x.shape)


def attention_along_both(x: Tensor, shared: nn.Module, rows: nn.Module, columns: nn.Module) -> Tensor:
    h, w = x.shape[2:]
    along = F.hardswish(shared(torch.cat([x.mean(3, keepdim=True), x.mean(2, keepdim=True).permute(0, 1, 3, 2)], 2)))
    of_rows, of_columns = torch.split(along, [h, w], 2)
    return x * rows(of_rows).sigmoid() * columns(of_columns.permute(0, 1, 3, 2)).sigmoid()


def windows(k: int) -> Callable[..., Tensor]:
    """Shifted windows of k x k on an image that is padded for them."""

    def apply(x: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
        n, c, h, w = x.shape
        padded = norm(F.pad(x, (0, -w % k, 0, -h % k)).permute(0, 2, 3, 1)).roll((-(k // 2), -(k // 2)), (1, 2))
        high, wide = padded.shape[1:3]
        parts = padded.view(n, high // k, k, wide // k, k, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, k * k, c)
        parts = parts + linear(parts).softmax(1)
        back = parts.view(n, high // k, wide // k, k, k, c).permute(0, 1, 3, 2, 4, 5).reshape(n, high, wide, c)
        return back.roll((k // 2, k // 2), (1, 2))[:, :h, :w].permute(0, 3, 1, 2).contiguous()

    return apply


def with_places(x: Tensor, mix: nn.Module) -> Tensor:
    n, _, h, w = x.shape
    y = torch.linspace(-1, 1, h, dtype=x.dtype, device=x.device).view(1, 1, h, 1).expand(n, 1, h, w)
    z = torch.linspace(-1, 1, w, dtype=x.dtype, device=x.device).view(1, 1, 1, w).expand(n, 1, h, w)
    return mix(torch.cat([x, y, torch.atan2(z + x[:, :1], y + 2)], 1))


def warped(x: Tensor, flow: nn.Module) -> Tensor:
    eye = torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(x.size(0), -1, -1)
    grid = F.affine_grid(eye, list(x.shape), align_corners=False) + 0.3 * flow(x).tanh().permute(0, 2, 3, 1)
    return F.grid_sample(x, grid, align_corners=False, padding_mode="border")


def mixed_by_patches(x: Tensor) -> Tensor:
    patches = F.unfold(x, 3, padding=1).view(x.size(0), x.size(1), 9, -1)
    return (patches * patches.softmax(2)).sum(2).view(x.shape)


def damped(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(x, norm="ortho")
    return torch.fft.irfft2(spectrum * torch.exp(-0.1 * spectrum.abs()), s=x.shape[-2:], norm="ortho")


def _convolution(draw: random.Random, c: int, h: int, w: int) -> nn.Module:
    k, d = draw.choice([1, 2, 3, 3, 3, 5, 7]), draw.choice([1, 1, 1, 2, 3])
    p = draw.choice([0, d * (k - 1) // 2, d * (k - 1) // 2, k - 1])
    mode = draw.choice(["reflect", "replicate", "circular"]) if p < min(h, w) and draw.random() < 0.3 else "zeros"
    stride, groups = draw.choice([1, 1, 1, 2, 2, 3]), draw.choice([1, 1, c])
    return nn.Conv2d(c, c * draw.choice([1, 1, 2]), k, stride, p, d, groups, draw.random() < 0.7, mode)


def _pool(draw: random.Random) -> nn.Module:
    k, stride, p, ceil = draw.choice([2, 3]), draw.choice([1, 2, 3]), draw.choice([0, 1]), draw.random() < 0.5
    if draw.random() < 0.5:
        return nn.MaxPool2d(k, stride, p, ceil_mode=ceil)
    return nn.AvgPool2d(k, stride, p, ceil, draw.random() < 0.5)


def _resized(draw: random.Random, h: int, w: int) -> nn.Module:
    size = draw.randint(1, 2 * h), draw.randint(1, 2 * w)
    mode = draw.choice(["nearest", "bilinear", "nearest-exact", "area", "bicubic"])
    corners = draw.random() < 0.5 if mode in ("bilinear", "bicubic") else None
    return Call(lambda x: F.interpolate(x, size=size, mode=mode, align_corners=corners))


def _layer(draw: random.Random, x: Tensor, channels_last: bool) -> nn.Module:
    """One of many; not every one fits."""
    c, h, w = x.shape[1:]
    mix = lambda into=c: nn.Conv2d(into, c, 1)  # noqa: E731
    choices: list[Callable[[], nn.Module]] = [
        *[lambda: _convolution(draw, c, h, w)] * 8,
        *[lambda: nn.ConvTranspose2d(c, c, draw.choice([2, 3, 4]), draw.choice([1, 2, 3]), draw.choice([0, 1]))] * 2,
        *[lambda: _pool(draw)] * 2,
        *[lambda: _resized(draw, h, w)] * 2,
        lambda: nn.Upsample(scale_factor=draw.choice([2, 1.5, 3]), mode=draw.choice(["nearest", "bilinear"])),
        lambda: nn.BatchNorm2d(c),
        lambda: nn.GroupNorm(draw.choice([1, c]), c),
        # of a single image, in which PyTorch makes channels of images, its own batch norm is wrong: docs/spatial.md
        lambda: nn.GroupNorm(c, c) if channels_last or len(x) == 1 else nn.InstanceNorm2d(c, affine=True),
        lambda: Call(lambda x, norm: norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), nn.LayerNorm(c)),
        lambda: draw.choice([nn.GELU(), nn.PReLU(), nn.Softplus(), nn.Hardswish()]),
        lambda: Call(lambda x: F.leaky_relu(x * 1, 0.2, inplace=True)),
        # masks are drawn in the order of memory, which few rows do not tell
        lambda: nn.GELU() if channels_last else nn.Dropout(0.3),
        lambda: Call(attention, nn.Linear(c, 3 * c), nn.Linear(c, c)),
        lambda: Call(attention_of_places, mix(), mix(), mix()),
        lambda: Call(attention_of_channels),
        lambda: Call(attention_along_both, mix(), mix(), mix()),
        lambda: Call(windows(draw.choice([2, 3, 4])), nn.LayerNorm(c), nn.Linear(c, c)),
        lambda: Call(with_places, mix(c + 2)),
        lambda: Call(warped, nn.Conv2d(c, 2, 3, padding=1)),
        lambda: Call(mixed_by_patches),
        lambda: Call(damped),
        lambda: nn.PixelShuffle(2),
        lambda: nn.PixelUnshuffle(2),
        lambda: Call(lambda x: torch.cat([x, x.flip(3).sin()], 1)),
        lambda: Call(lambda x: x[:, :, h // 4 : h - h // 4, w // 3 :]),
        lambda: nn.Softmax(draw.choice([1, 2, 3])),
        lambda: Call(lambda x: x.transpose(2, 3).contiguous()),
        lambda: Call(lambda x: torch.cat([x[:, :, ::2, ::2], x[:, :, ::2, ::2].roll(1, 2)], 1)),
        lambda: Call(
            lambda x: x.cumsum(2) / (1 + torch.arange(x.size(2), dtype=x.dtype, device=x.device).view(1, 1, -1, 1))
        ),
        lambda: Call(lambda x: F.normalize(x, dim=1) * x.norm(dim=(2, 3), keepdim=True)),
        lambda: Call(lambda x: torch.einsum("nchw,ndhw->ncd", x, x).unsqueeze(-1).mean(2, keepdim=True) * x),
        lambda: Call(lambda x: x.unfold(2, 3, 1).mean(-1)),
        lambda: Call(lambda x: F.pad(x, (1, 2, 0, 3), value=0.5)),
    ]
    return draw.choice(choices)()


def of_layers(
    make: Callable[[Tensor], nn.Module], x: Tensor, wanted: int, tries: int, most_elements: int, most_channels: int
) -> nn.Sequential:
    """Up to `wanted` layers, each made for what those before it make of the image, in double precision."""
    layers: list[nn.Module] = []
    for _ in range(tries):
        if len(layers) == wanted:
            break
        try:
            layer = make(x).double()
            with torch.no_grad():
                made = layer(x.clone())
        except (RuntimeError, ValueError):  # sizes that do not fit
            continue
        fits = 0 < made.numel() <= most_elements and made.size(1) <= most_channels
        # of what is nothing but rounding any element may be the maximum
        if fits and made.isfinite().all() and made.abs().max() > 1e-6:
            layers.append(layer)
            x = made
    return nn.Sequential(*layers)


def random_network(seed: int) -> tuple[nn.Sequential, Tensor]:
    """Layers and an image, in double precision; in channels_last for some seeds."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    channels_last = draw.random() < 0.4
    image = torch.randn(
        draw.choice([1, 1, 2, 3]), draw.choice([2, 3, 4]), draw.randint(1, 20), draw.randint(1, 20)
    ).double()
    make = lambda x: _layer(draw, x, channels_last)  # noqa: E731
    network: Any = of_layers(make, image, draw.randint(3, 8), 40, _MOST_ELEMENTS, _MOST_CHANNELS)
    if channels_last:
        image, network = (
            image.contiguous(memory_format=torch.channels_last),
            network.to(memory_format=torch.channels_last),
        )
    return network, image
