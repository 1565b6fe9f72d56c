"""Ops without a rule gather, exactly and audibly; DTensors of other uses behave as upstream has them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import make_layout
from rules import W3, check
from torch import nn
from torch.ao import quantization as ao
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchtp
from torchtp.dtensor.cut import full_of
from torchtp.testing import run_ranks

IMAGE = (2, 4, 9, 11)


def cut_image(requires_grad=False):
    mesh = init_device_mesh("cpu", (2,))
    torchtp.dtensor.mark(mesh, [0])
    x = torch.randn(IMAGE, generator=torch.Generator().manual_seed(0)).double()
    return x, distribute_tensor(x, mesh, [Shard(3)], src_data_rank=None).requires_grad_(requires_grad)


CASES = {
    "unfold": lambda x: F.unfold(x, 3),
    "fft_of_all_dims": lambda x: torch.fft.fftn(x).abs(),
    "fft_of_one_plane": lambda x: torch.fft.fft2(x[:1, :1]).abs(),
    "cumprod": lambda x: x.add(3).cumprod(3),
    "prod": lambda x: x.add(3).prod(3),
    "windows": lambda x: x.unfold(3, 4, 2).sin(),
    "windows_of_tokens": lambda x: (
        F.pad(x, (0, 4, 0, 6)).view(2, 4, 3, 5, 3, 5).permute(0, 2, 4, 3, 5, 1).reshape(18, 25, 4).sin()
    ),
    "nll_of_lines": lambda x: F.nll_loss(x.flatten(2).log_softmax(1), torch.arange(198).view(2, 99) % 4),
    "flatten": lambda x: x.flatten(1).sin(),
    "linear": lambda x: F.linear(x.permute(0, 2, 3, 1), torch.linspace(-1, 1, 12).double().view(3, 4)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.flatten(2).transpose(1, 2)] * 3),
    "grid_sample": lambda x: F.grid_sample(
        x,
        torch.linspace(-2, 2, 80).double().view(2, 4, 5, 2),
        "bicubic",
        padding_mode="reflection",
        align_corners=False,
    ),
    "rrelu": lambda x: F.rrelu(x, 0.25, 0.25, training=True),  # writes its slopes and returns something else
    "fractional_pool": lambda x: F.fractional_max_pool2d(
        x, 2, (4, 5), _random_samples=torch.full((2, 4, 2), 0.3).double()
    ),
    "index": lambda x: x[:, :, torch.tensor([1, 4])][..., torch.tensor([0, 3, 9])].sin(),
}


def run_case(name, mesh, kwargs):
    torchtp.dtensor.mark(init_device_mesh("cpu", mesh[0]), [0])
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    torch.manual_seed(0)
    check(CASES[name], mesh, [torch.randn(IMAGE).double()], double=False, gathers=True)


@pytest.mark.parametrize("name", CASES)
def test_ops_without_a_rule_are_exact(name):
    run_ranks(run_case, 3, name, W3, {})


def run_where():
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    x, mine = cut_image()
    with torch.inference_mode():  # which does not take it apart
        places = torch.where(mine > 0.5)
    for place, wanted in zip(places, torch.where(x > 0.5), strict=True):
        torch.testing.assert_close(place.full_tensor(), wanted)


def test_places_of_a_condition_are_those_of_the_whole():
    run_ranks(run_where, 2)


def run_sums_by_a_mask():
    """Of which each rank has a summand, while all have the mask."""
    whole, x = cut_image(requires_grad=True)
    reference = whole.clone().requires_grad_()
    picked = [image.sum((2, 3))[image.mean((2, 3)) > 0] for image in (reference, x)]
    assert 0 < picked[0].numel() < 8
    torch.testing.assert_close(full_of(picked[1]), picked[0])
    slopes = []
    for image, values in zip((reference, x), picked, strict=True):
        (slope,) = torch.autograd.grad(values.pow(2).sum(), image, create_graph=True)
        slopes.append(torch.autograd.grad((slope * slope).sum(), image)[0])
    torch.testing.assert_close(full_of(slopes[1]), slopes[0])


def test_a_whole_mask_picks_from_sums():
    run_ranks(run_sums_by_a_mask, 2)


def reflected(x):
    grid = F.affine_grid(torch.eye(2, 3).double().expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, "bicubic", padding_mode="reflection", align_corners=False)


def run_notices():
    _, mine = cut_image()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            reflected(mine)
    return [str(warning.message) for warning in caught if warning.category is torchtp.GatherWarning]


def test_a_gather_is_said_once():
    for messages in run_ranks(run_notices, 2, fresh=True):
        assert len(messages) == 1
        assert "grid_sampler_2d" in messages[0] and "6336 bytes" in messages[0]


def run_strict():
    _, mine = cut_image(requires_grad=True)
    with torchtp.strict(), pytest.raises(torchtp.GatherError, match="grid_sampler_2d"):
        reflected(mine)
    product = reflected(mine)
    with torchtp.strict(), pytest.raises(torchtp.GatherError):
        product.square().sum().backward()


def test_strict_refuses_a_gather_on_every_rank_in_backward_too():
    run_ranks(run_strict, 2)


@torch.library.custom_op("torchtp_test::drifted", mutates_args=())
def drifted(x: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """An op of a library that knows nothing of DTensors: it mixes all columns."""
    return x.cumsum(3).roll(rows, 2) * weight.view(-1, 1, 1)


@torch.library.custom_op("torchtp_test::drifted_backward", mutates_args=())
def drifted_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rows: int) -> list[torch.Tensor]:
    grad = grad.roll(-rows, 2)
    return [(grad * weight.view(-1, 1, 1)).flip(3).cumsum(3).flip(3), (grad * x.cumsum(3)).sum((0, 2, 3))]


def _save(ctx, inputs, output):
    *tensors, ctx.rows = inputs
    ctx.save_for_backward(*tensors)


drifted.register_autograd(
    lambda ctx, grad: (*torch.ops.torchtp_test.drifted_backward(grad, *ctx.saved_tensors, ctx.rows), None),
    setup_context=_save,
)


class Drifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.weight = nn.Parameter(torch.linspace(0.1, 0.4, 4))

    def forward(self, x):
        return self.leave(drifted(self.enter(x), self.weight, 2))


def run_op_of_another_library():
    torch.manual_seed(0)
    single = Drifting().double()
    mine = torchtp.parallelize(copy.deepcopy(single), make_layout({"w": 3}), output="full")
    image = torch.randn(2, 2, 9, 11).double()
    images = [image.clone().requires_grad_() for _ in range(2)]
    with torchtp.strict(), pytest.raises(torchtp.GatherError, match="torchtp_test.drifted"):
        mine(image)
    with pytest.warns(torchtp.GatherWarning, match="torchtp_test.drifted"):
        output = mine(images[1])
    expected = single(images[0])
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    for each in (output, expected):
        each.square().mean().backward()
    torch.testing.assert_close(images[1].grad, images[0].grad, rtol=1e-10, atol=1e-10)
    for parameter, theirs in zip(mine.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_an_op_of_another_library_gathers_with_notice():
    run_ranks(run_op_of_another_library, 3)


def run_writes():
    x, mine = cut_image()
    mine[:, 1] = 0.0
    x[:, 1] = 0.0
    assert torch.equal(mine.full_tensor(), x)
    mine[..., 2:7] = 1.0
    x[..., 2:7] = 1.0
    mine[..., 2].zero_()
    x[..., 2].zero_()
    assert torch.equal(mine.full_tensor(), x)


def run_writes_into_what_is_whole():
    """As RetinaNet makes its targets: from a pooled tensor, with plain numbers."""
    x, mine = cut_image()
    targets = []
    for image in (x, mine):
        target = torch.zeros_like(image.mean((2, 3)))
        target[torch.tensor([0, 1]), torch.tensor([3, 2])] = 1.0
        target[torch.tensor([True, False])] += torch.arange(4.0).double()
        target[image.amax((2, 3)) > image.amax()] = 2.0
        target[image.mean((2, 3)) > 0] = -1.0
        targets.append(target)
    assert torch.equal(targets[1].full_tensor(), targets[0])


def run_quantized():
    """Observers write their statistics, also of what every rank holds whole."""
    x, cut = (image.float().requires_grad_() for image in cut_image())
    for make in (ao.default_fused_act_fake_quant, ao.MovingAverageMinMaxObserver, ao.default_fake_quant):
        alone, mine = make(), make()
        for _ in range(2):
            for whole, got in ((alone(x.mean((2, 3))), mine(cut.mean((2, 3)))), (alone(x.sin()), mine(cut.sin()))):
                torch.testing.assert_close(got.full_tensor(), whole)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value)
        (expected,), (grad,) = (
            torch.autograd.grad(fn(y.mean((2, 3))).square().sum(), y) for fn, y in ((alone, x), (mine, cut))
        )
        torch.testing.assert_close(grad.full_tensor(), expected)


@pytest.mark.filterwarnings("ignore::torchtp.GatherWarning")
def test_observers_of_quantization_take_what_is_whole():
    run_ranks(run_quantized, 2)


def run_losses_of_what_is_whole():
    x, mine = cut_image(requires_grad=True)
    x.requires_grad_()
    target = torch.linspace(0, 1, 4).double().expand(2, 4)
    for loss in (F.smooth_l1_loss, F.binary_cross_entropy_with_logits):
        whole, cut = (loss(image.mean((2, 3)), target) for image in (x, mine))
        torch.testing.assert_close(cut.full_tensor(), whole)
        (expected,), (grad,) = torch.autograd.grad(whole, x), torch.autograd.grad(cut, mine)
        torch.testing.assert_close(grad.full_tensor(), expected)


def test_losses_of_what_every_rank_holds_and_plain_targets():
    run_ranks(run_losses_of_what_is_whole, 2)


def test_writing_into_what_every_rank_holds():
    run_ranks(run_writes_into_what_is_whole, 2)


def test_writing_into_rows_of_other_ranks():
    run_ranks(run_writes, 2)


def run_other_uses():
    """Tensor parallel: [batch, sequence, features] with Shard(2), on a mesh that cuts no images."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, w = torch.randn(2, 6, 8), torch.randn(8, 4)
    mine, weight = distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(w, mesh, [Shard(0)])
    product = mine.softmax(-1) @ weight
    placements = [str(t.placements) for t in (mine.relu(), mine + mine, mine[:, :3], mine.transpose(1, 2), product)]
    torch.testing.assert_close(product.full_tensor(), x.softmax(-1) @ w)
    with pytest.raises(RuntimeError, match="mixed"):
        mine + torch.ones(8)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    assert rows.mean().full_tensor().item() == pytest.approx(x.mean().item())
    assert F.linear(rows, distribute_tensor(w.t(), mesh, [Replicate()])).placements == (Shard(0),)
    return placements


def run_on_a_mesh_of_others():
    """A rank outside of a mesh has DTensors on it that hold nothing, also where another mesh cuts images."""
    torchtp.dtensor.mark(init_device_mesh("cpu", (2,)), [0])
    mesh = DeviceMesh("cpu", [1])
    ones = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)])
    total = ones.cumsum(0).add(2).mul(ones).sum().to_local()
    assert total.item() == (54 if dist.get_rank() == 1 else 0)
    return [part.to_local().numel() for part in ones.split([2, 1], dim=1)]


def test_ranks_outside_of_a_mesh_hold_nothing():
    assert run_ranks(run_on_a_mesh_of_others, 2, fresh=True) == [[0, 0], [8, 4]]


def test_other_uses_of_dtensor_are_as_before():
    for placements in run_ranks(run_other_uses, 2, fresh=True):
        assert placements[:4] == ["(Shard(dim=2),)", "(Shard(dim=2),)", "(Shard(dim=2),)", "(Shard(dim=1),)"]
