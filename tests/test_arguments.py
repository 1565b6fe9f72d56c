"""What a forward writes into its arguments reaches the caller, as on one device."""

import math

import pytest
import torch
from models import make_layout
from torch import nn

import torchtp
from torchtp.testing import run_ranks


class Writer(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.write = write

    def forward(self, *args, **kwargs):
        return self.write(self.conv, *args, **kwargs)


def appends(conv, x, losses):
    y = conv(x)
    losses.append(y.square().mean())
    losses[0] = y.mean((2, 3))
    return y


def fills(conv, batch):
    image, other = batch["image"], batch["others"][0]
    batch["features"] = {"y": conv(image), "both": [image + other]}
    del batch["others"][1]
    return batch["features"]["y"]


def normalizes(conv, x, *, scale):
    x.sub_(0.5).div_(scale)
    return conv(x)


def writes_a_slice(conv, x, sums):
    x[:, 0].mul_(2)
    x[..., 2:5] += 1
    sums += x.mean((0, 2, 3)).detach()
    return conv(x)


def twice(conv, x, y):
    return conv(x) * (3.0 if x is y else 1.0)


def returns_what_it_got(conv, batch):
    batch["image"] = conv(batch["image"])
    return batch


def make_image(seed=0):
    return torch.rand(2, 3, 8, 9, generator=torch.Generator().manual_seed(seed)).double()


def arguments_of(write):
    """Positional and named ones, anew each time."""
    first, second = make_image(), make_image(1)
    if write is appends:
        return (first, [torch.zeros(()).double()]), {}
    if write is fills:
        return ({"image": first, "others": [second, second]},), {}
    if write is normalizes:
        return (first,), {"scale": 0.2}
    if write is writes_a_slice:
        return (first, torch.zeros(3).double()), {}
    if write is twice:
        return (first, first), {}
    return ({"image": first},), {}


def compare(axes, write):
    seen = []
    for is_cut in (False, True):
        torch.manual_seed(0)
        model = Writer(write).double()
        if is_cut:
            torchtp.parallelize(model, make_layout(axes), output="full")
        args, kwargs = arguments_of(write)
        output = model(*args, **kwargs)
        assert write is not returns_what_it_got or output is args[0]
        tensors = torch.utils._pytree.tree_leaves((output, args))
        assert all(type(one) is torch.Tensor for one in tensors)
        sum(one.square().sum() for one in tensors).backward()
        seen.append([*(one.detach() for one in tensors), *(one.grad for one in model.parameters())])
    for got, expected in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("write", [appends, fills, normalizes, writes_a_slice, twice, returns_what_it_got])
@pytest.mark.filterwarnings("ignore::torchtp.GatherWarning")
def test_what_forward_writes_into_arguments_reaches_the_caller(write, axes):
    run_ranks(compare, math.prod(axes.values()), axes, write)


def without_writes():
    model = torchtp.parallelize(Writer(lambda conv, x, more: conv(x)), make_layout({"w": 2}), output="full").eval()
    x, more = torch.rand(1, 3, 8, 8), [1, {"a": None}]
    with torchtp.strict(), torch.inference_mode():
        model(x, more)
        model.write = lambda conv, x, more: conv(x.sub_(0.5))
        with pytest.raises(torchtp.GatherError, match="changes an image in place, which its caller holds whole"):
            model(x, more)
    assert more == [1, {"a": None}]


def test_an_image_is_gathered_only_where_it_was_written():
    run_ranks(without_writes, 2)
