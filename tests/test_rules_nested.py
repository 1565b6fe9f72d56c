"""Two mesh axes that cut one dim, one inside the other: every rule is exact for such tensors, and sequences of pixels need no gather."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from rules import HW, check, device_mesh_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchtp
from torchtp.dtensor.cut import cut_locally, full_of
from torchtp.dtensor.moving import recut
from torchtp.dtensor.upstream import spec_of
from torchtp.testing import run_ranks

ROWS_TWICE = ((2, 2), (2, 2))
# Rules that take such tensors, and others, which get them with another dim cut: of these a few cases will do.
TAKE = ["linear", "norm", "product", "reduction", "shape", "sharing"]
DO_NOT = ["convolution", "fallback", "grid_sample", "interpolate", "matrices", "pooling", "unfold"]


def _names(module):
    names = list(importlib.import_module(f"test_rules_{module}").CASES)
    return names if module in TAKE else names[::4]


CASES = [(module, name) for module in TAKE + DO_NOT for name in _names(module)]


def run_nested(module, name):
    rules = importlib.import_module(f"test_rules_{module}")
    run = getattr(rules, "run_case", None) or rules.compare
    rules.check = lambda *args, **options: check(*args, **{**options, "gathers": True})
    more = [p for p in list(inspect.signature(run).parameters.values())[2:] if p.default is p.empty]
    try:
        run(name, ROWS_TWICE, *({"plain": True}.get(p.name, {}) for p in more))
    finally:
        rules.check = check


@pytest.mark.parametrize(("module", "name"), CASES)
def test_rules_take_a_dim_that_two_axes_cut(module, name):
    run_ranks(run_nested, 4, module, name)


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def image_of(tokens, like):
    return tokens.transpose(1, 2).reshape(like.shape)


def _heads(y):
    return y.unflatten(-1, (2, -1)).transpose(1, 2)


def _block(x, scale, qkv, project, expand, shrink):
    """A transformer's, with layer scale, between two convolutions' worth of image."""
    y = tokens(x)
    q, k, v = map(_heads, F.linear(F.layer_norm(y, [4]), qkv).chunk(3, -1))
    with sdpa_kernel(SDPBackend.MATH):  # which can be derived twice
        attended = F.scaled_dot_product_attention(q, k, v)
    y = y + scale * F.linear(attended.transpose(1, 2).flatten(2), project)
    y = y + F.linear(F.gelu(F.linear(y, expand)), shrink)
    return x + image_of(y, x).sin()


def _scores(x, bias):
    y = tokens(x)
    scores = (y @ y.transpose(1, 2) / 2 + bias).softmax(-1)
    return image_of(scores @ y, x)


def _windows(x):
    parts = x.view(1, 4, 4, 2, 2, 3).permute(0, 2, 4, 3, 5, 1).reshape(-1, 6, 4)
    mixed = (parts @ parts.transpose(1, 2)).softmax(-1) @ parts
    return mixed.view(1, 4, 2, 2, 3, 4).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)


def _windows_of(x, height, width):
    rows, columns = x.size(2) // height, x.size(3) // width
    parts = x.view(1, 4, rows, height, columns, width).permute(0, 2, 4, 3, 5, 1).reshape(-1, height * width, 4)
    mixed = (parts @ parts.transpose(1, 2)).softmax(-1) @ parts
    return mixed.view(1, rows, columns, height, width, 4).permute(0, 5, 1, 3, 2, 4).reshape(x.shape)


def _queried_by_all(x):
    """Each window by queries of the whole image, as in Global Context ViT."""
    parts = x.view(1, 4, 2, 4, 3, 2).permute(0, 2, 4, 3, 5, 1).reshape(6, 8, 4)
    queries = tokens(F.avg_pool2d(x, 2))[:, :6].repeat(6, 1, 1)
    return (queries @ parts.transpose(1, 2)).softmax(-1) @ parts


def _class_attention(x, token):
    y = tokens(x)
    joined = torch.cat([token.expand(x.size(0), -1, -1), y], 1)
    asked = F.scaled_dot_product_attention(joined[:, :1], joined, joined)
    return torch.cat([asked, y], 1)


def _with_class_token(x, token, weight):
    y = torch.cat([token.expand(x.size(0), -1, -1), tokens(x)], 1)
    y = y + F.linear(F.layer_norm(y, [4]), weight)
    y = y + (y @ y.transpose(1, 2)).softmax(-1) @ y
    return image_of(y[:, 1:], x) * y[:, 0, :, None, None]


def _correlated(x, codes):
    """Each pixel's scores for all others are an image, whose pyramid is looked up around a place; as RAFT does."""
    y = x.flatten(2)
    volume = (y.transpose(1, 2) @ y).reshape(48, 1, 8, 6)
    around = torch.linspace(-0.7, 0.7, 48 * 8, dtype=x.dtype).view(48, 2, 2, 2).sin()
    levels = [volume, F.avg_pool2d(volume, 2), F.max_pool2d(F.pad(volume, (1, 1, 1, 1), mode="replicate"), 2)]
    levels.append(F.interpolate(levels[1], size=(5, 3), mode="bilinear"))
    found = torch.cat([F.grid_sample(level, around, align_corners=True).flatten(1) for level in levels], 1)
    return found.view(1, 8, 6, 16).permute(0, 3, 1, 2).sin() * codes


def _coded(x, codes):
    """Pixels as the nearest of some vectors, their gradient passed on; as VQ-VAE does."""
    y = tokens(x).flatten(0, 1)
    nearest = (y @ codes.t()).max(1)[1]
    chosen = F.embedding(nearest.view(1, 48), codes)
    return image_of(chosen + tokens(x).cumsum(2), x) * F.one_hot(nearest, 5).double().mean()


def _masked_losses(x, prototypes, weights):
    """Losses of masks that are made of prototypes, whose gradient is to be cut as these are: else the larger ones go to all ranks."""
    made = F.conv2d(x, prototypes)[0]
    masks = torch.einsum("in,nhw->ihw", weights, made)
    wanted = torch.linspace(0, 1, masks.numel(), dtype=x.dtype).view(masks.shape)
    losses = F.binary_cross_entropy_with_logits(masks, wanted, reduction="none").mean((1, 2))
    return losses.sum() + F.mse_loss(masks, wanted) + F.smooth_l1_loss(masks.sin(), wanted, reduction="sum")


def _convolved(x, weight, bias, grouped):
    y = F.conv1d(x.flatten(2), weight, bias).sin()
    few = F.conv1d(x[..., :3, :1].flatten(2), grouped, groups=2)  # of three pixels one rank has none
    return y * F.conv1d(x.flatten(2), grouped, groups=2) + few.sum()


SEQUENCES = {  # of one image, which leaves no images to cut instead; with the shapes of parameters
    "block": (_block, [(4,), (12, 4), (4, 4), (8, 4), (4, 8)]),
    "scores": (_scores, [(48, 48)]),
    "windows": (_windows, []),
    "norms": (lambda x, w: F.group_norm(x.flatten(2), 2, w) * F.batch_norm(x.flatten(2), None, None, training=True), [(4,)]),
    "pooled": (lambda x: tokens(x).mean(1, keepdim=True).square() * tokens(x).amax(1, keepdim=True), []),
    "positions": (lambda x, p: (tokens(x) + p).square(), [(1, 48, 4)]),
    "pieces": (lambda x: torch.cat([x.flatten(2)[:, 1:3], x.flatten(2).narrow(1, 0, 2) * 2], 1).sin(), []),
    "convolution_after": (lambda x, w: F.conv2d(image_of(tokens(x).sin(), x), w, padding=1), [(3, 4, 3, 3)]),
    "shapes_in_place": (lambda x: x.flatten(2).clone().transpose_(1, 2).squeeze_(0).mul_(2).unsqueeze_(0).sin(), []),
    "odd_rows": (lambda x: x + image_of(tokens(x[..., :7, :5]).softmax(1), x[..., :7, :5]).sum(), []),
    "few_windows": (lambda x: _windows_of(x, 4, 3), []),
    "class_token": (lambda x, token, w: _with_class_token(x, token, w), [(1, 1, 4), (4, 4)]),
    "queried_by_all": (_queried_by_all, []),
    "class_attention": (_class_attention, [(1, 1, 4)]),
    "rows_of_a_sequence": (lambda x: tokens(x)[:, 3:41:3].exp() * tokens(x)[:, 5:18] + tokens(x)[:, 7:8], []),
    "split_sequence": (lambda x: sum(piece.sin().sum() * i for i, piece in enumerate(tokens(x).split([5, 20, 23], 1))), []),
    "joined_sequences": (lambda x: torch.cat([tokens(x), tokens(F.avg_pool2d(x, 2)), tokens(x)[:, ::5]], 1).square(), []),
    "other_grids": (lambda x: x.flatten(2).view(1, 4, 4, 12).sin().reshape(1, 2, 3, 32), []),
    "correlated": (_correlated, [(16, 1, 1)]),
    "coded": (_coded, [(5, 4)]),
    "masked_losses": (_masked_losses, [(32, 4, 1, 1), (10, 32)]),
    "convolved": (_convolved, [(6, 4, 1), (6,), (6, 2, 1)]),
    "and_back_again": (lambda x: x * image_of(tokens(x).exp(), x) + F.max_pool2d(x, 3, 1, 1), []),
}  # fmt: skip
ONCE = {
    "block",
    "scores",
    "norms",
    "pooled",
    "odd_rows",
    "few_windows",
    "class_token",
    "correlated",
    "coded",
    "masked_losses",
    "convolved",
}  # the second derivatives of norms, softmax and convolutions gather; extremes have none
if torch.__version__ >= (2, 14):
    ONCE.add("class_attention")  # by its flash attention, which has none on one device either


def _marked():
    torchtp.dtensor.mark(device_mesh_of(HW[0]), [0, 1])


def run_sequence(name):
    _marked()
    fn, shapes = SEQUENCES[name]
    generator = torch.Generator().manual_seed(2)
    image, *parameters = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(1, 4, 8, 6), *shapes]
    )
    check(fn, HW, [image], parameters, double=name not in ONCE)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_of_an_image_cut_along_both_dims_need_no_gather(name):
    run_ranks(run_sequence, 4, name)


def run_writes():
    _marked()

    def into_a_copy(x):
        y = x.flatten(2).clone()
        y[:, 1] = 0
        y[..., 3:9] *= 2
        y[..., 5].add_(1)
        return y.sin()

    def into_a_view(x):
        y = x.sin()
        y.flatten(2)[:, :2, 7:20].mul_(3)
        part = y.flatten(2)[..., ::5]
        y.view(4, 48)[2].zero_()
        return y.square().sum((2, 3)) + part.sum(-1)

    def into_rolled(x):
        y = x.flatten(2).roll(5, -1)
        y[..., -1] = y[..., 0]
        return y.flip(-1).cumsum(-1)

    image = torch.randn(1, 4, 8, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for fn in (into_a_copy, into_a_view, into_rolled):
        check(fn, HW, [image], gathers=True)


def test_writes_into_sequences_reach_what_they_were_taken_from():
    run_ranks(run_writes, 4)


def run_uneven():
    """Upstream takes both axes at once where there is a group of all ranks, and gets other chunks."""
    layout = make_layout({"h": 2, "w": 2})
    mesh = layout.spatial_mesh
    whole = torch.arange(66.0).view(1, 33, 2)
    part = distribute_tensor(whole, mesh, [Shard(1), Shard(1)], src_data_rank=None)
    assert torch.equal(full_of(part), whole)
    assert torch.equal(
        recut(part.to_local(), spec_of(part), (Replicate(), Shard(1))), whole.chunk(2, 1)[mesh.get_local_rank("w")]
    )
    assert torch.equal(
        recut(part.to_local(), spec_of(part), (Shard(1), Replicate())), whole.chunk(2, 1)[mesh.get_local_rank("h")]
    )
    assert torch.equal(cut_locally(whole, mesh, part.placements), part.to_local())
    once = distribute_tensor(whole, mesh, [Replicate(), Shard(1)], src_data_rank=None)
    assert torch.equal(recut(once.to_local(), spec_of(once), part.placements), part.to_local())


def test_chunks_of_chunks_may_be_uneven():
    run_ranks(run_uneven, 4)


def run_parameters_of_others():
    """Of a mesh that cuts no images, beside one that does: upstream's affair, on all torch the same."""
    _marked()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    weight = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), Shard(0)], src_data_rank=None).requires_grad_()
    with torchtp.strict():
        optimizer = torch.optim.SGD([weight], lr=1.0, foreach=True)
        (weight * weight).sum().backward()
        optimizer.step()
    assert weight.placements == weight.grad.placements == (Shard(0), Shard(0))
    assert torch.equal(weight.full_tensor(), -torch.ones(8, 4))


def test_parameters_of_other_parallelisms_stay_as_they_are_cut():
    run_ranks(run_parameters_of_others, 4)
