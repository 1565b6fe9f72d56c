"""Fake tensors of every op have the sizes, strides and dtypes that the op's results have, however what goes in lies in memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import Compared, is_faked
from sharding import shardings
from torch import Tensor

from torchtp.testing import run_ranks


def lies(rng: random.Random, tensor: Tensor) -> Tensor:
    """The numbers of a tensor, somehow in memory."""
    how = rng.randrange(5)
    if how == 0 and tensor.dim() in (4, 5):
        return tensor.to(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)
    if how == 1:
        return torch.stack([tensor, tensor], -1)[..., 0]
    if how == 2:
        return tensor[:1].expand_as(tensor)
    if how == 3:
        return tensor.mT.contiguous().mT
    return tensor


def calls(rng: random.Random, cut: Any, x: Tensor) -> dict[str, Any]:
    """Of every op by name: a call with this rank's part of an image `x` of four channels."""
    ops, dims = torch.ops.torchtp, x.dim() - 2
    part, at, groups = lies(rng, cut.shard(x)), cut.cut(x), cut.groups
    kernel = rng.choice([1, 3])
    numbers = [rng.choice([1, 2])] * dims, [kernel // 2] * dims, [1] * dims
    weight, each = (lies(rng, torch.randn(*sizes, *[kernel] * dims, dtype=x.dtype)) for sizes in ((6, 4), (4, 1)))
    turned = lies(rng, torch.randn(4, 6, *[kernel] * dims, dtype=x.dtype))
    row, keep = torch.rand(4, dtype=x.dtype), torch.rand(x.size(0), dtype=x.dtype)
    sizes = [2 * size - 1 for size in x.shape[2:]]
    mode = rng.choice(["nearest", "linear"])
    wanted = [[rank - 1 for rank in range(dist.get_world_size())], [rank + 3 for rank in range(dist.get_world_size())]]
    made = {
        "convolution": lambda p, w: ops.convolution(p, w, None, *numbers, False, [0] * dims, 1, *at),
        "each": lambda p, w: ops.convolution(p, w, None, *numbers, False, [0] * dims, 4, *at),
        "transposed": lambda p, w: ops.convolution(p, w, None, *numbers, True, [0] * dims, 1, *at),
        "normed": lambda p, w: ops.depthwise_layer_norm(p, w, None, row, row, 1e-5, True, *numbers, *at)[0],
        "batch": lambda p, w: ops.batch_norm(p, w, row, None, None, True, 0.1, 1e-5, groups)[0],
        "group": lambda p, w: ops.group_norm(p, w, row, 2, 1e-5, groups)[0],
        "layer": lambda p, w: ops.layer_norm_channels_first(p, w, row, 1e-5)[0],
        "scale": lambda p, w: ops.layer_scale(p, p, w, keep),
        "pulled": lambda p, w: ops.pull(p, at[0][0], at[1][0], *wanted, groups[0]),
        "max": lambda p, w: ops.max_pool(p, [3] * dims, *numbers[:1], [1] * dims, *numbers[2:], False, *at)[0],
        "average": lambda p, w: ops.avg_pool(p, [3] * dims, *numbers[:1], [1] * dims, False, True, None, *at),
        "resampled": lambda p, w: ops.interpolate(p, mode, sizes, [0.0] * dims, False, *at),
    }
    weights = {"convolution": weight, "each": each, "transposed": turned, "normed": each}
    if dims != 2:
        del made["normed"]
    return {name: (call, part, weights.get(name, row)) for name, call in made.items()}


def compare(seed: int, count: int) -> set[str]:
    import torchtp  # noqa: F401

    rng, drawn = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    torch.manual_seed(seed)
    with Compared() as compared:
        for turn in range(count):
            dims = (2, 2, 3, 1)[turn % 4]
            cut = rng.choice(shardings(range(2, 2 + dims)))
            dtype = rng.choice([torch.float64, torch.float32, *([torch.bfloat16] if dims == 2 else [])])
            x = torch.randn(2, 4, *[rng.randint(3, 7) for _ in range(dims)], dtype=dtype)
            for name, (call, part, weight) in calls(rng, cut, x).items():
                if dtype == torch.bfloat16 and name in ("batch", "group", "layer"):
                    weight = weight.float()
                inputs = [tensor.detach().requires_grad_() for tensor in (part, weight)]
                out = call(*inputs)
                dy = lies(drawn, torch.randn(out.shape, dtype=out.dtype))
                wanted = inputs if name not in ("pulled", "max", "average", "resampled") else inputs[:1]
                (dx, *_) = torch.autograd.grad(out, wanted, dy.requires_grad_(), create_graph=name == "max")
                if name == "max":
                    torch.autograd.grad(dx, dy, torch.ones_like(dx))
    return compared.seen


@pytest.mark.parametrize("ranks", [1, 3])
def test_fake_results_lie_as_real_ones_do(ranks):
    seen = set.union(*run_ranks(compare, ranks, 7, 8, timeout=120.0))
    names = [name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "torchtp::" in name]
    faked = {name for name in names if is_faked(getattr(torch.ops.torchtp, name).default)}
    assert faked - seen == {"share", "pull_start", "pull_finish"}  # of lazy.py; the halves of pull
