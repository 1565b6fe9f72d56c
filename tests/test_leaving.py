"""Models that take activations whole, or their parts, inside forward: gradients are exact, or it is said that they are not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import make_layout
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import torchtp
from torchtp.testing import run_ranks

SHAPE = (2, 4, 5, 7)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


class Taken(nn.Module):
    """Convolved whole between convolutions of cut images, and met again by them."""

    def __init__(self):
        super().__init__()
        self.enter, self.middle, self.leave = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.gamma = nn.Parameter(torch.rand(4, 1, 1))

    def part(self, x):
        y = whole(x)
        y = self.middle(y.flip(3)).sin() * self.gamma
        return x * y + y.roll(2, 3).cumsum(3) * self.gamma

    def forward(self, x):
        return self.leave(self.part(self.enter(x).square()))


class Checkpointed(Taken):
    def forward(self, x):
        return self.leave(checkpoint(self.part, self.enter(x).square(), use_reentrant=False))


class Head(nn.Module):
    """Leaves with a plain tensor."""

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(7, 3)

    def forward(self, x):
        return self.head(whole(self.enter(x).square()))


class Pooled(nn.Module):
    """A vector that every rank holds as a DTensor's local tensor, and that gates the cut image."""

    def __init__(self):
        super().__init__()
        self.enter, self.gate = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x):
        x = self.enter(x)
        y = x.mean((2, 3))
        y = y.to_local() if isinstance(y, DTensor) else y
        return x * torch.sigmoid(self.gate(y))[:, :, None, None]


class Redistributed(nn.Module):
    """Whole as a DTensor for a while."""

    def __init__(self):
        super().__init__()
        self.enter, self.middle, self.leave = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.gamma = nn.Parameter(torch.rand(4, 1, 1))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.enter(x)
        y = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) if isinstance(x, DTensor) else x
        y = self.norm(self.middle(y.flip(3)) * self.gamma)
        z = y.redistribute(placements=x.placements) if isinstance(x, DTensor) else y
        return self.leave(x * z + y.roll(1, 2))


def compare(make, axes):
    layout = make_layout(axes)
    torch.manual_seed(4)
    single = make().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    image = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).double()
    mine, theirs = image.clone().requires_grad_(), image.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", torchtp.PartWarning)
        output = whole(model(mine))
    expected = single(theirs)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    output.sin().sum().backward()
    expected.sin().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)
    for (name, actual), wanted in zip(model.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(
            actual.grad, wanted.grad, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}, {"w": 4}], ids=str)
@pytest.mark.parametrize("make", [Taken, Checkpointed, Head, Pooled, Redistributed], ids=lambda make: make.__name__)
def test_whole_activations_have_exact_gradients(make, axes):
    run_ranks(compare, torch.Size(axes.values()).numel(), make, axes)


class Part(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how
        self.enter, self.gamma = nn.Conv2d(4, 4, 3, padding=1), nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x):
        x = self.enter(x)
        return (x.to_local(**self.how) * self.gamma).sum()


def part():
    layout = make_layout({"w": 2})
    image = torch.randn(SHAPE)
    with pytest.warns(torchtp.PartWarning, match="Part calls to_local"):
        torchtp.parallelize(Part(), layout)(image)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torchtp.PartWarning)
        model = torchtp.parallelize(Part(grad_placements=layout.shard(image).placements), layout)
        model(image)
        with torch.no_grad():
            torchtp.parallelize(Part(), layout)(image)
        outside = layout.shard(image).detach().requires_grad_()
        outside.to_local().sum().backward()
        torch.testing.assert_close(outside.grad.full_tensor(), torch.ones(SHAPE))
    dist.barrier()


def test_a_part_is_taken_audibly():
    run_ranks(part, 2)


def penalty(make, output):
    layout = make_layout({"w": 2})
    torch.manual_seed(4)
    single = make().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output=output)
    results = []
    for each in (model, single):
        image = torch.linspace(-1, 1, 280, dtype=torch.float64).reshape(SHAPE).requires_grad_()
        (gradient,) = torch.autograd.grad(whole(each(image)).square().sum(), image, create_graph=True)
        F.silu(gradient).sum().backward()
        results.append(image.grad)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    for (name, actual), wanted in zip(model.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(
            actual.grad, wanted.grad, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("output", ["full", "dtensor"])
@pytest.mark.parametrize("make", [Head, Taken], ids=lambda make: make.__name__)
def test_second_derivative_through_a_whole_activation(make, output):
    run_ranks(penalty, 2, make, output)


class Heat(nn.Module):
    """A cut image, and what every rank holds; their last ops keep what they give for backward."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 3, 3, padding=1), nn.Linear(3, 2)

    def forward(self, x):
        x = self.conv(x)
        return x, self.linear(x.exp().mean((2, 3))).square()


class Painted(Heat):
    """Written in place where forward takes it whole."""

    def forward(self, x):
        x, vector = super().forward(x)
        x, vector = whole(x), whole(vector)
        x.mul_(2).clamp_(-1, 1)
        vector[:, 0] = vector[:, 0].sigmoid()
        return x, vector


def written(axes, make, output):
    layout = make_layout(axes)
    torch.manual_seed(5)
    single = make().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output=output)
    image = torch.randn(SHAPE, dtype=torch.float64)
    gradients = []
    for each in (model, single):
        heat, vector = each(image)
        if output != "local" and each is model:
            heat, vector = layout.full(heat), whole(vector)
        heat.mul_(3).add_(1)
        heat[:, :2] = heat[:, :2].sigmoid()
        vector *= 20
        (heat.sum() + vector.sin().sum()).backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    return gradients


@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "w": 1}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("output", ["full", "dtensor", "local"])
@pytest.mark.parametrize("make", [Heat, Painted])
def test_plain_outputs_can_be_written_in_place(make, output, axes):
    for gradients in run_ranks(written, torch.Size(axes.values()).numel(), axes, make, output):
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


def printed():
    image = torch.linspace(0, 1, 280).reshape(SHAPE)
    loss = make_layout({"w": 2}).shard(image).mean()
    return f"{loss:.4f} {loss.item():.4f}" if dist.get_rank() == 0 else None


def test_one_rank_prints_a_loss():
    assert run_ranks(printed, 2) == ["0.5000 0.5000", None]


class Distances(nn.Module):
    """Weights from outside of PyTorch, as of a distance transform, and thresholds of Python."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = self.enter(x)
        import numpy as np  # which PyTorch does without

        values = x.detach()
        weights = np.cumsum(values.numpy(), 3) + np.asarray(values).mean() + values.mean((2, 3)).numpy()[0, 1]
        return x * torch.from_numpy(weights) + values.tolist()[0][1][2][6] + values.amax((2, 3)).tolist()[1][2]


def left_to_numpy(axes):
    layout = make_layout(axes)
    torch.manual_seed(0)
    single = Distances().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    image = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).double()
    wanted = single(image)
    with pytest.warns(torchtp.GatherWarning, match=r"numpy\(\) has no rule for a cut tensor in Distances"):
        output = model(image)
    torch.testing.assert_close(output.full_tensor(), wanted)
    for loss in (wanted.square().mean(), output.square().mean().full_tensor()):
        loss.backward()
    torch.testing.assert_close(model.enter.weight.grad, single.enter.weight.grad)
    for ask in (lambda tensor: tensor.numpy(), lambda tensor: tensor.tolist()):
        with pytest.raises(RuntimeError, match=r"call full_tensor\(\) first, on every rank"):
            ask(output.detach())
    assert output.detach().mean().tolist() == output.mean().item()
    with pytest.raises(RuntimeError, match=r"call detach\(\)\.numpy\(\)"):
        output.numpy()


@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}], ids=str)
def test_values_leave_to_numpy_whole(axes):
    pytest.importorskip("numpy")
    run_ranks(left_to_numpy, 2 if len(axes) == 1 else 4, axes, fresh=True)


def _logged(axes):
    layout = make_layout(axes)
    model = torchtp.parallelize(nn.Conv2d(4, 4, 3).double(), layout)
    output = model(torch.full(SHAPE, layout.data_rank + 1.0).double())
    loss = output.square().mean().detach()
    mine = loss.full_tensor().clone()
    everybody = [torch.empty_like(mine) for _ in range(layout.group.size())]
    dist.all_gather(everybody, loss, group=layout.group)
    assert everybody[layout.group.rank()] == mine
    dist.all_reduce(loss, group=layout.group)
    torch.testing.assert_close(loss.item(), torch.stack(everybody).sum().item())
    with pytest.raises(TypeError, match=r"allreduce_ of torch.distributed takes plain .* call full_tensor\(\) first"):
        dist.all_reduce(output.detach(), group=layout.group)
    if dist.get_backend(layout.group) == "torchtp":  # gloo sends what lies at address 0
        with pytest.raises(RuntimeError, match="reduce_scatter takes tensors that have data, got one of shape"):
            dist.reduce_scatter(mine, [loss] * layout.group.size(), group=layout.group)


@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_a_loss_goes_into_a_collective(axes, backend):
    run_ranks(_logged, 2 if len(axes) == 1 else 4, axes, backend=backend)
