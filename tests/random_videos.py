"""Random sequences of layers on clips of a few frames: convolutions and pools of volumes, attention over time and over places, recurrent cells."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from random_networks import Call, of_layers
from torch import Tensor, nn

_MOST_ELEMENTS, _MOST_CHANNELS, _NUM_LAYERS = 30000, 24, 5


def attention_over_time(x: Tensor, qkv: nn.Module) -> Tensor:
    n, c, t, h, w = x.shape
    q, k, v = qkv(x.permute(0, 3, 4, 2, 1).reshape(-1, t, c)).chunk(3, -1)
    return x + F.scaled_dot_product_attention(q, k, v).view(n, h, w, t, c).permute(0, 4, 3, 1, 2)


def attention_over_places(x: Tensor, qkv: nn.Module) -> Tensor:
    n, c, t, h, w = x.shape
    q, k, v = qkv(x.permute(0, 2, 3, 4, 1).reshape(n * t, h * w, c)).chunk(3, -1)
    return x + F.scaled_dot_product_attention(q, k, v).view(n, t, h, w, c).permute(0, 4, 1, 2, 3)


def windows(k: int) -> Callable[..., Tensor]:
    """Shifted windows of t x k x k."""

    def apply(x: Tensor, linear: nn.Module) -> Tensor:
        n, c, t, h, w = x.shape
        padded = F.pad(x, (0, -w % k, 0, -h % k))
        high, wide = padded.shape[3:]
        parts = padded.roll((-1, -1), (3, 4)).permute(0, 2, 3, 4, 1).reshape(n, t, high // k, k, wide // k, k, c)
        parts = parts.permute(0, 2, 4, 1, 3, 5, 6).reshape(-1, t * k * k, c)
        parts = parts + (linear(parts) @ parts.mT).softmax(-1) @ parts
        back = parts.view(n, high // k, wide // k, t, k, k, c).permute(0, 3, 1, 4, 2, 5, 6)
        return back.reshape(n, t, high, wide, c).roll((1, 1), (2, 3))[:, :, :h, :w].permute(0, 4, 1, 2, 3)

    return apply


def shifted_in_time(share: int) -> Callable[[Tensor], Tensor]:
    """Some channels of the frame before, some of the one after, written into zeros."""

    def apply(x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        made[:, :share, :-1] = x[:, :share, 1:]
        made[:, share : 2 * share, 1:] = x[:, share : 2 * share, :-1]
        made[:, 2 * share :] = x[:, 2 * share :]
        return made

    return apply


def frame_by_frame(x: Tensor, layer: nn.Module) -> Tensor:
    return layer(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (x.size(0), x.size(2))).transpose(1, 2)


def gated_recurrent(x: Tensor, gates: nn.Module, candidate: nn.Module) -> Tensor:
    state, states = torch.zeros_like(x[:, :, 0]), []
    for frame in x.unbind(2):
        update, reset = gates(torch.cat([frame, state], 1)).sigmoid().chunk(2, 1)
        state = (1 - update) * state + update * candidate(torch.cat([frame, reset * state], 1)).tanh()
        states.append(state)
    return torch.stack(states, 2)


def correlated(x: Tensor) -> Tensor:
    before = x.roll(1, 2)
    shifts = [(x * before.roll((i, j), (3, 4))).mean(1, keepdim=True) for i in (-1, 0, 1) for j in (0, 2)]
    return x * torch.stack(shifts).softmax(0)[0]


def warped(x: Tensor) -> Tensor:
    eye = torch.eye(3, 4, dtype=x.dtype, device=x.device).expand(x.size(0), -1, -1)
    grid = F.affine_grid(0.9 * eye, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid + 0.1 * x[:, :1].permute(0, 2, 3, 4, 1).tanh(), align_corners=False)


def _convolution(draw: random.Random, c: int) -> nn.Module:
    kernel = [draw.choice([1, 2, 3]), draw.choice([1, 3, 5]), draw.choice([1, 2, 3])]
    padding = [draw.choice([0, k // 2, k - 1]) for k in kernel]
    stride, dilation = ([draw.choice([1, 1, 2]) for _ in kernel] for _ in range(2))
    mode = draw.choice(["zeros", "zeros", "replicate", "circular", "reflect"])
    wide, groups = c * draw.choice([1, 2]), draw.choice([1, c])
    return nn.Conv3d(c, wide, kernel, stride, padding, dilation, groups, padding_mode=mode)


def _pool(draw: random.Random) -> nn.Module:
    if draw.random() < 0.5:
        return nn.MaxPool3d(
            draw.choice([2, (1, 2, 2), 3]), draw.choice([1, 2, (1, 2, 3)]), ceil_mode=draw.random() < 0.5
        )
    return nn.AvgPool3d((1, 3, 3), (1, 2, 1), (0, 1, 1), draw.random() < 0.5, draw.random() < 0.5)


def _resized(draw: random.Random, h: int, w: int) -> nn.Module:
    size = draw.randint(1, 4), draw.randint(1, 2 * h), draw.randint(1, 2 * w)
    mode = draw.choice(["trilinear", "nearest", "area", "nearest-exact"])
    return Call(lambda x: F.interpolate(x, size, mode=mode))


def _padded(draw: random.Random) -> nn.Module:
    if draw.random() < 0.5:
        pads = [draw.randint(-1, 2) for _ in range(6)]
        return Call(lambda x: F.pad(x, pads, value=0.3))
    pads = [draw.randint(0, 2) for _ in range(6)]
    return Call(lambda x: F.pad(x, pads, mode="replicate"))


def _layer(draw: random.Random, x: Tensor) -> nn.Module:
    """One of many; not every one fits."""
    n, c, _, h, w = x.shape
    # of a single clip PyTorch's own batch norm is wrong for some orders in memory: docs/spatial.md
    normed = [lambda: nn.BatchNorm3d(c), lambda: nn.InstanceNorm3d(c, affine=True)] if n > 1 else []
    choices: list[Callable[[], nn.Module]] = [
        *[lambda: _convolution(draw, c)] * 8,
        *[lambda: _pool(draw)] * 2,
        *[lambda: _padded(draw)] * 2,
        *normed,
        lambda: nn.GroupNorm(draw.choice([1, c]), c),
        lambda: nn.ConvTranspose3d(c, c, (1, 3, 2), (1, 2, 2), (0, 1, 0)),
        lambda: nn.ConvTranspose3d(c, c, 3, 2, 1, 1),
        lambda: _resized(draw, h, w),
        lambda: nn.Upsample(scale_factor=(1, 2, 2), mode=draw.choice(["trilinear", "nearest"])),
        lambda: nn.PReLU(c),
        lambda: Call(attention_over_time, nn.Linear(c, 3 * c)),
        lambda: Call(attention_over_places, nn.Linear(c, 3 * c)),
        lambda: Call(windows(draw.choice([2, 3])), nn.Linear(c, c)),
        lambda: Call(shifted_in_time(max(1, c // 3))),
        lambda: Call(frame_by_frame, nn.Conv2d(c, c, 3, draw.choice([1, 2]), 1)),
        lambda: Call(gated_recurrent, nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.Conv2d(2 * c, c, 3, padding=1)),
        lambda: Call(correlated),
        lambda: Call(warped),
        lambda: Call(lambda x: x * F.adaptive_avg_pool3d(x, 1).sigmoid()),
        lambda: Call(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4))),
        lambda: Call(lambda x: F.adaptive_max_pool3d(x, (1, 3, 2))),
        lambda: Call(lambda x: x.mean(2, keepdim=True) + x * 0.5),
        lambda: Call(lambda x: x.softmax(2)),
        lambda: Call(lambda x: torch.cat([x[:, :, ::2], x[:, :, 1::2]], 2)),
        lambda: Call(lambda x: torch.cat([x, x.diff(dim=2, prepend=x[:, :, :1])], 1)),
        lambda: Call(lambda x: x.cumsum(2) * 0.3),
        lambda: Call(lambda x: x.transpose(3, 4).contiguous()),
        lambda: Call(lambda x: x.flip(2, 4)),
        lambda: Call(lambda x: F.lp_pool2d(x.flatten(1, 2), 2, 2).unflatten(1, x.shape[1:3])),
        lambda: Call(lambda x: x.amax(1, keepdim=True) * x),
        lambda: Call(lambda x: F.local_response_norm(x, 3)),
        lambda: Call(lambda x: torch.fft.ifftn(torch.fft.fftn(x, dim=(2, 3)) * 0.9, dim=(2, 3)).real),
    ]
    return draw.choice(choices)()


def random_video(seed: int) -> tuple[nn.Sequential, Tensor]:
    """Layers, and one or two clips of up to four frames, in double precision."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = draw.choice([1, 2]), draw.choice([2, 3]), draw.randint(1, 4), draw.randint(2, 11), draw.randint(2, 11)
    clip = torch.randn(shape).double()
    return of_layers(lambda x: _layer(draw, x), clip, _NUM_LAYERS, 60, _MOST_ELEMENTS, _MOST_CHANNELS), clip
