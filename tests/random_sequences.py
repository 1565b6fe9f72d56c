"""Random networks that make a sequence of their pixels, as people write them: tokens before it, windows, slices, axial and grouped attention."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 4


class RandomSequence(nn.Module):
    """An image, convolved, as a sequence; some steps on that; an image, or rows of the sequence, again."""

    def __init__(self, seed: int):
        super().__init__()
        draw = random.Random(seed)
        self.embed = nn.Conv2d(2, CHANNELS, draw.choice([(1, 1), (3, 3), (2, 2)]), draw.choice([1, 2]), 1)
        self.steps = [draw.choice(STEPS) for _ in range(draw.randint(1, 5))]
        self.layers = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in self.steps)
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in self.steps)
        self.tokens = nn.Parameter(torch.randn(1, draw.choice([0, 0, 1, 3]), CHANNELS))
        self.ends_as_image = draw.random() < 0.7

    def forward(self, x: Tensor) -> Tensor:
        image = self.embed(x)
        y = image.flatten(2).transpose(1, 2)
        number = self.tokens.size(1)
        if number:
            y = torch.cat([self.tokens.expand(y.size(0), -1, -1), y], 1)
        for step, layer, norm in zip(self.steps, self.layers, self.norms, strict=True):
            y = y + step(norm(y), layer, image.shape[2:], number)
        if not self.ends_as_image:
            return y
        again = y[:, number:].transpose(1, 2).reshape(image.shape)
        return (
            F.conv2d(again, again.new_ones(1, CHANNELS, 3, 3), padding=1)
            + (y[:, :number].sum((1, 2), keepdim=True)[..., None])
        )


def _linear(y, layer, grid, number):
    return F.gelu(layer(y))


def _attention(y, layer, grid, number):
    q = layer(y).unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q.sin()).transpose(1, 2).flatten(2)


def _attention_by_hand(y, layer, grid, number):
    q, k = layer(y), y.roll(1, -1)
    return ((q @ k.transpose(1, 2)) * 0.5).softmax(-1) @ y


def _channel_attention(y, layer, grid, number):
    q, k = F.normalize(layer(y), dim=1), F.normalize(y.exp(), dim=1)
    return ((q.transpose(1, 2) @ k).softmax(-1) @ y.transpose(1, 2)).transpose(1, 2)


def _linear_attention(y, layer, grid, number):
    k = layer(y).softmax(1)
    return y.sigmoid() @ (k.transpose(1, 2) @ y)


def _class_attends(y, layer, grid, number):
    number = max(1, number)
    asked = (layer(y[:, :number]) @ y.transpose(1, 2)).softmax(-1) @ y
    return torch.cat([asked, y[:, number:] * 0.5], 1)


def _windows(y, layer, grid, number):
    (height, width), pixels = grid, y[:, number:]
    size = next(size for size in (4, 3, 2, 1) if height % size == 0 and width % size == 0)
    rows, columns = height // size, width // size
    parts = pixels.reshape(y.size(0), rows, size, columns, size, CHANNELS).permute(0, 1, 3, 2, 4, 5)
    parts = parts.reshape(-1, size * size, CHANNELS)
    parts = (layer(parts) @ parts.transpose(1, 2)).softmax(-1) @ parts
    parts = parts.view(-1, rows, columns, size, size, CHANNELS).permute(0, 1, 3, 2, 4, 5).reshape(pixels.shape)
    return torch.cat([y[:, :number], parts], 1)


def _axial(y, layer, grid, number):
    n = y.size(0)
    rows = y[:, number:].reshape(n * grid[0], grid[1], CHANNELS)
    rows = (rows @ layer(rows).transpose(1, 2)).softmax(-1) @ rows
    return torch.cat([y[:, :number], rows.view(n, grid[0] * grid[1], CHANNELS)], 1)


def _convolved(y, layer, grid, number):
    image = y[:, number:].transpose(1, 2).unflatten(2, grid)
    image = F.conv2d(image, layer.weight[:, :1, None, None].expand(-1, -1, 3, 3), padding=1, groups=CHANNELS)
    return torch.cat([y[:, :number], image.flatten(2).transpose(1, 2)], 1)


def _convolved_along(y, layer, grid, number):
    return F.conv1d(y.transpose(1, 2), layer.weight[:, :, None].expand(-1, -1, 3), padding=1).transpose(1, 2)


def _rolled(y, layer, grid, number):
    return layer(y).roll(3, 1) * y.flip(1)


def _summed_up(y, layer, grid, number):
    return layer(y).cumsum(1) / y.size(1)


def _mean_and_largest(y, layer, grid, number):
    return layer(y.mean(1, keepdim=True)) * y - y.amax(1, keepdim=True) + y.var(1, keepdim=True)


def _halves(y, layer, grid, number):
    first, second = y.split([y.size(1) // 2, y.size(1) - y.size(1) // 2], 1)
    return torch.cat([layer(second), first.sin()], 1)


def _every_other(y, layer, grid, number):
    even, odd = y[:, ::2], y[:, 1::2]
    return torch.cat([layer(odd), even], 1)


def _every_other_row(y, layer, grid, number):
    pixels = y[:, number:].unflatten(1, grid)
    mixed = torch.cat([pixels[:, ::2], layer(pixels[:, 1::2])], 1).flatten(1, 2)
    return torch.cat([y[:, :number].exp(), mixed], 1)


def _written(y, layer, grid, number):
    z = layer(y).clone()
    z[:, 1:-1] *= 2
    z[:, 0] = z[:, -1]
    return z


def _padded(y, layer, grid, number):
    return F.pad(layer(y), (0, 0, 2, 1))[:, 2:-1] + F.pad(y, (0, 0, 1, 0))[:, 1:]


def _sorted(y, layer, grid, number):
    return layer(y).sort(1).values


def _picked(y, layer, grid, number):
    places = torch.arange(y.size(1) - 1, -1, -1, device=y.device)
    return layer(y)[:, places] + y.index_select(1, places)


def _masked(y, layer, grid, number):
    return layer(y).masked_fill(y > 0.3, 0.1)


def _coarse(y, layer, grid, number):
    coarse = F.avg_pool1d(y.transpose(1, 2), 2, ceil_mode=True).transpose(1, 2)
    return (y @ layer(coarse).transpose(1, 2)).softmax(-1) @ coarse


def _grouped(y, layer, grid, number):
    tokens = y.unflatten(2, (2, 2)).permute(0, 2, 1, 3).reshape(-1, y.size(1), 2)
    tokens = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
    return layer(tokens.view(y.size(0), 2, y.size(1), 2).permute(0, 2, 1, 3).flatten(2))


def _recurrent(y, layer, grid, number):
    weights = [layer.weight, layer.weight.t().contiguous()]  # cuDNN takes no others
    return torch.rnn_tanh(y, y.new_zeros(1, y.size(0), CHANNELS), weights, False, 1, 0.0, True, False, True)[0]


def _recurrent_rows(y, layer, grid, number):
    rows = y[:, number:].unflatten(1, grid).flatten(0, 1)
    states = [torch.zeros(2, rows.size(0), CHANNELS // 2, dtype=y.dtype, device=y.device)] * 2
    w = layer.weight
    weights = [torch.cat([w, w.t()]), w.flatten().view(8, 2), torch.cat([w.t(), w]), w.t().reshape(8, 2)]
    mixed = torch.lstm(rows, states, weights, False, 1, 0.0, True, True, True)[0]
    return torch.cat([y[:, :number], mixed.unflatten(0, (-1, grid[0])).flatten(1, 2)], 1)


def _repeated(y, layer, grid, number):
    return (layer(y).repeat(1, 2, 1).unflatten(1, (2, -1)).sum(1)) * y.repeat_interleave(2, 1)[:, ::2]


STEPS = [
    _linear,
    _attention,
    _attention_by_hand,
    _channel_attention,
    _linear_attention,
    _class_attends,
    _windows,
    _axial,
    _convolved,
    _convolved_along,
    _rolled,
    _summed_up,
    _mean_and_largest,
    _halves,
    _every_other,
    _every_other_row,
    _written,
    _padded,
    _sorted,
    _picked,
    _masked,
    _coarse,
    _grouped,
    _repeated,
    _recurrent,
    _recurrent_rows,
]


def random_sequence(seed: int) -> tuple[nn.Module, Tensor]:
    """A network and an image of a few rows and columns, of one or two images."""
    torch.manual_seed(seed)
    draw = random.Random(seed + 10_000)
    network = RandomSequence(seed).double()
    shape = draw.choice([1, 1, 2]), 2, draw.randint(4, 13), draw.randint(4, 13)
    return network, torch.randn(shape, dtype=torch.float64)
