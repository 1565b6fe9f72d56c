"""Parts of cut tensors that are copies here: what a model writes into one, or into the whole, is where PyTorch puts it."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import make_layout
from test_models import whole
from torch import nn

import torchtp
from torchtp.testing import run_ranks


def constants(y, z):
    y[..., 3:9] = 0.5
    y[:, :, 4:6, ::3] = 2
    return y


def rows_of_another(y, z):
    y[..., 3:20] = z[..., 5:22] * 2
    y[:, :, 1::4] = z[:, :, :1]
    return y


def channels(y, z):
    y[:, :2] += z[:, 2:]
    return y * y


def a_part_of_a_part(y, z):
    part = y[..., 1:-1]
    part.mul_(3)
    part[:, 0].add_(1)
    part[..., 2:].sub_(z[..., 4:])
    return y + part.sum()


def the_whole_afterwards(y, z):
    part = y[..., 1:-1]
    inner = part[..., 2:]
    y.mul_(3)
    F.relu_(y)
    return F.pad(part, (1, 1)) + inner.mean() * z


def a_part_of_what_is_gone(y, z):
    return F.pad(F.relu((y + z)[..., 2:-3], inplace=True), (2, 3))


def single_rows(y, z):
    y[..., 5] = 1.5
    y[:, :, 7] *= 2
    y.select(-1, 20).zero_()
    y[..., 3] = z[..., 4]
    return y


def other_shapes(y, z):
    blocks = y.view(*y.shape[:-1], 6, 7)
    blocks[..., 0] = 0
    blocks.mul_(2)
    y.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return y * z


def a_reshape_that_copies(y, z):
    rows = y.transpose(-1, -2).reshape(*y.shape[:2], -1)
    rows.mul_(3)
    pad = F.pad(z, (3, 3, 3, 3), mode="circular")
    return y + rows.mean(-1)[..., None, None] + pad[..., 3:-3, 3:-3]


def copies_of_channels(y, z):
    """Of what is not contiguous `contiguous()` and `reshape` copy: what is written into that stays there."""
    y[:, :2].contiguous().mul_(3)
    y[:, 0].contiguous().zero_()
    y[:, 1:3].flatten(0, 1).add_(1)
    y[:, :1].permute(0, 2, 3, 1).contiguous().sub_(1)
    y[:, :2].unsqueeze(0).squeeze(0).flatten(2).contiguous().mul_(5)
    return y * z


def copies_of_rows(y, z):
    y[..., :16].contiguous().mul_(3)
    y[:, :, ::2].contiguous().zero_()
    y[..., 5].contiguous().add_(1)
    F.relu(y[..., 3:9].flatten(2), inplace=True)
    second = y.chunk(2, -1)[1].contiguous()
    second.mul_(2)
    return y * z + second.mean()


def copies_of_what_is_expanded(y, z):
    mean = y.mean(-1, keepdim=True).expand_as(y).contiguous()
    mean[..., 3:20] += 1
    first = y[:, :1].expand(-1, 4, -1, -1).reshape(8, *y.shape[2:])
    first[::4] *= 2
    return mean * z + first.view_as(y)


def copies_of_diagonals(y, z):
    y.diagonal(dim1=-2, dim2=-1).contiguous().fill_(1.0)
    return y * z


def canvas_like_the_image(y, z):
    canvas = torch.zeros_like(y)
    canvas[..., 1:] = y[..., :-1]
    canvas[:, :, :-2] += z[:, :, 2:]
    return canvas


def cost_volume(y, z):
    n, c, h, w = y.shape
    volume = y.new_zeros(n, 2 * c, 3, h, w)
    volume[:, :c, 0], volume[:, c:, 0] = y, z
    for i in (1, 2):
        volume[:, :c, i, :, i:] = y[..., i:]
        volume[:, c:, i, :, i:] = z[..., :-i]
    return volume.sum(2)


def larger_canvas(y, z):
    """As detectors make a batch of images of several sizes."""
    n, c, h, w = y.shape
    canvas = y.new_full((n, c, h + 3, w + 20), 0.5)
    for i in range(n):
        canvas[i, :, :h, :w].copy_(y[i])
    return canvas[..., :h, :w] * z + canvas[..., -h:, -w:]


def plain_canvas(y, z):
    canvas = torch.zeros(y.shape, dtype=torch.float64)
    canvas[..., 2:] = (y * z)[..., :-2]
    canvas += y
    return canvas


def plain_canvas_by_numbers(y, z):
    channels = torch.tensor([1, 2, 4, 5])
    canvas = torch.zeros(y.shape[0], 6, *y.shape[2:], dtype=torch.float64)
    canvas[:, channels] = y * z
    canvas.index_add_(1, channels, z)
    canvas.scatter_add_(1, torch.ones_like(canvas[:, :1], dtype=torch.int64), torch.mean(y, 1, keepdim=True))
    return canvas[:, channels]


def plain_canvas_at_cut_places(y, z):
    """What comes back to the canvas differs from rank to rank, and meets places that are DTensors."""
    canvas = torch.zeros(y.shape, dtype=torch.float64)
    canvas[y > 0] = torch.masked_select(z, y > 0)
    canvas.scatter_add_(3, torch.argsort(y, 3), z)
    canvas.masked_fill_(z > 1, 0.5)
    canvas[:, torch.mean(y, (0, 2, 3)).argsort()] += z
    return canvas * y


def plain_canvas_times_the_cut(y, z):
    canvas = torch.ones(y.shape, dtype=torch.float64)
    canvas.mul_(y)
    canvas *= z
    canvas.addcmul_(y, z)
    canvas.div_(torch.exp(y))
    canvas.lerp_(z, torch.sigmoid(y))
    return canvas * y


def spectrum(y, z):
    """The derivative of the inverse transform writes into a part."""
    return torch.fft.irfft2(torch.fft.rfft2(y) * 2, s=y.shape[-2:]) + z


GATHERING = {
    other_shapes, a_reshape_that_copies, copies_of_channels, copies_of_rows, copies_of_diagonals, plain_canvas,
    plain_canvas_by_numbers, plain_canvas_at_cut_places, plain_canvas_times_the_cut, spectrum
}  # fmt: skip
CASES = [
    constants,
    rows_of_another,
    channels,
    a_part_of_a_part,
    the_whole_afterwards,
    a_part_of_what_is_gone,
    single_rows,
    other_shapes,
    a_reshape_that_copies,
    copies_of_channels,
    copies_of_rows,
    copies_of_what_is_expanded,
    copies_of_diagonals,
    canvas_like_the_image,
    cost_volume,
    larger_canvas,
    plain_canvas,
    plain_canvas_by_numbers,
    plain_canvas_at_cut_places,
    plain_canvas_times_the_cut,
    spectrum,
]


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Conv2d(8 if case is cost_volume else 4, 1, 3, padding=1)
        self.case = case

    def forward(self, x):
        return self.head(self.case(self.left(x), self.right(x)))


def gradients(net, x, target):
    loss = F.mse_loss(net(x), target)
    loss.backward()
    found = {"loss": loss.detach(), "x": x.grad} | {name: p.grad for name, p in net.named_parameters()}
    return {name: whole(value).clone() for name, value in found.items() if value is not None}


def compare(index, axes):
    case, layout = CASES[index], make_layout(axes)
    x = torch.randn(2, 2, 19, 42, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target = torch.randn(2, 1, 19, 42, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    single = Net(case).double()
    expected = gradients(single, x.clone().requires_grad_(), target)
    single.zero_grad()
    mine = torchtp.parallelize(copy.deepcopy(single), layout)
    cut = layout.shard(x).detach().requires_grad_()
    if case in GATHERING:
        warnings.simplefilter("ignore", torchtp.GatherWarning)
        got = gradients(mine, cut, target)
    else:
        with torchtp.strict():
            got = gradients(mine, cut, target)
    with torch.inference_mode():
        got["inferred"], expected["inferred"] = whole(mine(layout.shard(x))), single(x)
    errors = {name: ((got[name] - want).abs().max() / want.abs().max()).item() for name, want in expected.items()}
    return {name: error for name, error in errors.items() if not error <= 1e-9}


@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 3}, {"h": 2, "w": 2}], ids=["w2", "h3", "h2w2"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_writes_land_where_they_do_on_one_device(case, axes):
    size = torch.Size(axes.values()).numel()
    for rank, errors in enumerate(run_ranks(compare, size, CASES.index(case), axes, backend="torchtp")):
        assert not errors, f"rank {rank}: {errors}"


def write_often():
    layout = make_layout({"w": 2})
    y = layout.shard(torch.ones(1, 1, 3, 9))
    for _ in range(300):
        y[..., 1:].add_(1)
    remembered = len(y.to_local().untyped_storage()._torchtp_memory.parts)
    expected = torch.ones(1, 1, 3, 9)
    expected[..., 1:] += 300
    return remembered, torch.equal(y.full_tensor(), expected)


def test_parts_that_are_gone_are_forgotten():
    for remembered, right in run_ranks(write_often, 2, backend="torchtp"):
        assert remembered <= 64
        assert right


def keep_on_one_rank():
    layout = make_layout({"w": 2})
    x = torch.arange(16.0).view(1, 1, 2, 8)
    y, kept = layout.shard(x), []
    for _ in range(70):
        part = y[..., 3:7]
        if dist.get_rank() == 0 and len(kept) < 10:
            kept.append(part)
    y.add_(1)
    return [torch.equal(layout.full(y), x + 1), torch.equal(layout.full(y[..., 1:5]), x[..., 1:5] + 1)]


def test_parts_that_one_rank_alone_has_kept_part_no_ranks():
    assert run_ranks(keep_on_one_rank, 2, backend="torchtp") == [[True, True]] * 2


class Looked(nn.Module):
    def forward(self, x):
        canvas = torch.zeros(1, 2, 4, 8)
        self.seen = canvas[0, 0] if dist.get_rank() == 0 else None  # to plot it
        canvas[:, :1] = x
        canvas[:, 1:] = 2 * x
        return F.avg_pool2d(canvas, 3, 1, 1)


def look_on_one_rank():
    layout = make_layout({"w": 2})
    x = torch.arange(32.0).view(1, 1, 4, 8)
    output = torchtp.parallelize(Looked(), layout)(x)
    return torch.allclose(layout.full(output), F.avg_pool2d(torch.cat([x, 2 * x], 1), 3, 1, 1))


@pytest.mark.filterwarnings("ignore::torchtp.GatherWarning")
def test_what_one_rank_alone_looks_at_parts_no_ranks():
    assert run_ranks(look_on_one_rank, 2, backend="torchtp") == [True, True]


def shift():
    layout = make_layout({"w": 2})
    y = layout.shard(torch.arange(32).view(1, 1, 4, 8))
    part = y[..., 1:6]
    torchtp.stats(reset=True)
    torch.ops.aten.__lshift__.Scalar(y, 1)
    calls = sum(call.count for group in torchtp.stats().groups for call in group.calls)
    torch.ops.aten.__ilshift__.Scalar(y, 1)
    return calls, layout.full(part).flatten().tolist() == [
        2 * (8 * row + column) for row in range(4) for column in range(1, 6)
    ]


def test_a_shift_writes_only_in_place():
    assert run_ranks(shift, 2, backend="torchtp") == [(0, True)] * 2
