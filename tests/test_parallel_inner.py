"""Gradients that a forward takes itself, to go on with them, are those of one device."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchtp
from torchtp.testing import run_ranks


class InnerLoop(nn.Module):
    """Three steps of gradient descent in forward, on weights or on copies of them, with or without a graph."""

    def __init__(self, copies, create_graph):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.weight, self.gain = nn.Parameter(torch.randn(4, 4, 3, 3) * 0.2), nn.Parameter(torch.rand(4, 1, 1))
        self.copies, self.create_graph = copies, create_graph

    def adapted(self, x, weight, gain):
        return (F.conv2d(self.stem(x), weight, padding=1) * gain).tanh()

    def forward(self, x):
        fast = [self.weight, self.gain]
        if self.copies:
            fast = [one.detach().clone().requires_grad_() for one in fast]
        for _ in range(3):
            loss = (self.adapted(x, *fast) - x.mean(1, keepdim=True)).square().mean()
            grads = torch.autograd.grad(loss, fast, create_graph=self.create_graph)
            fast = [one - 0.5 * grad for one, grad in zip(fast, grads, strict=True)]
        return self.adapted(x, *fast)


BORN = {
    "zeros": lambda weight: torch.zeros(2, 2, 1, 1),
    "scalar": lambda weight: torch.tensor(0.3),
    "parameter": lambda weight: nn.Parameter(torch.zeros(2, 1, 1).double()),
    "copy": lambda weight: nn.Parameter(weight.detach()[:, :1, :1, :1].transpose(0, 1).clone()),
}


class Latent(nn.Module):
    """A leaf that is born in forward and fitted there by backward()."""

    def __init__(self, born, plain_first):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        self.born, self.plain_first = born, plain_first

    def forward(self, x):
        kept = self.conv(x).detach()
        latent = BORN[self.born](self.conv.weight).to(x.dtype).requires_grad_()
        for _ in range(2):
            gained = kept * (1 + latent) if self.plain_first else kept * latent
            (gained - x[:, :2]).square().mean().backward()
            with torch.no_grad():
                latent -= latent.grad
                latent.grad = None
        return self.conv(x) * latent


class Flow(nn.Module):
    """x moves along tanh(conv(x)), or what `solve` makes of that."""

    def __init__(self, solve):
        super().__init__()
        self.conv, self.solve = nn.Conv2d(3, 3, 3, padding=1), solve

    def step(self, x):
        return self.conv(x).tanh()

    def forward(self, x):
        return self.solve(self, self.conv(x))


class Adjoint(torch.autograd.Function):
    """Steps of Euler, back again with everything in one vector and of a length that depends on its norm."""

    @staticmethod
    def forward(ctx, flow, x, *parameters):
        ctx.flow, ctx.parameters = flow, parameters
        for _ in range(2):
            x = x + 0.1 * flow.step(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        state = [x, grad, *map(torch.zeros_like, ctx.parameters)]
        for _ in range(2):
            with torch.enable_grad():
                x = state[0].detach().requires_grad_()
                moved = ctx.flow.step(x)
                grads = torch.autograd.grad(moved, (x, *ctx.parameters), state[1])
            slopes = torch.cat([part.reshape(-1) for part in (-moved.detach(), *grads)])
            slopes = slopes.split([part.numel() for part in state])
            length = 0.1 / (1 + torch.cat(slopes).norm())
            state = [part + length * slope.view(part.shape) for part, slope in zip(state, slopes, strict=True)]
        return None, *state[1:]


class Assign(torch.autograd.Function):
    """Writes where autograd does not see it."""

    @staticmethod
    def forward(ctx, scratch, value, index):
        ctx.index = index
        scratch.data[index] = value
        return scratch

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[ctx.index], None


def _stages(flow, x):
    """Runge and Kutta's, kept in a tensor that is written stage by stage, of a length that depends on the first."""
    first = flow.step(x)
    length = first.square().mean().sqrt()
    stages = Assign.apply(torch.empty(*x.shape, 2, dtype=x.dtype), first, (..., 0))
    then = flow.step(x + torch.sum(stages[..., :1] * (torch.tensor([0.5]).double() * length), dim=-1).view_as(x))
    stages = Assign.apply(stages, then, (..., 1))
    return x + torch.sum(stages * (torch.tensor([0.3, 0.7]).double() * length), dim=-1)


def _adjoint(flow, x):
    return Adjoint.apply(flow, x, *flow.conv.parameters())


def compare(axes, make, *args):
    x = torch.rand(2, 3, 8, 9, generator=torch.Generator().manual_seed(0)).double()
    seen = []
    for is_cut in (False, True):
        torch.manual_seed(0)
        model = make(*args).double()
        if is_cut:
            torchtp.parallelize(model, make_layout(axes), output="full")
        for _ in range(2):
            output = model(x)
            output.square().mean().backward()
        seen.append([output.detach(), *(one.grad for one in model.parameters() if one.grad is not None)])
    for got, expected in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


AXES = [{"w": 2}, {"h": 2, "w": 2}]


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_an_inner_loop(axes, copies, create_graph):
    run_ranks(compare, math.prod(axes.values()), axes, InnerLoop, copies, create_graph)


@pytest.mark.parametrize("plain_first", [True, False])
@pytest.mark.parametrize("born", BORN)
def test_a_latent_that_is_fitted_in_forward(born, plain_first):
    run_ranks(compare, 2, {"w": 2}, Latent, born, plain_first)


@pytest.mark.parametrize("solve", [_adjoint, _stages])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_a_flow_is_solved_in_functions_of_peoples_own(axes, solve):
    run_ranks(compare, math.prod(axes.values()), axes, Flow, solve)


class Transformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 1, 1))

    def forward(self, x):
        fast = torch.func.grad(lambda weight: F.conv2d(x, weight).square().mean())(self.weight)
        return F.conv2d(x, fast)


def _transformed():
    model = torchtp.parallelize(Transformed(), make_layout({"w": 2}))
    with pytest.raises(RuntimeError, match="this rank's contribution alone: take the gradient by torch.autograd.grad"):
        model(torch.randn(1, 3, 4, 6))


def test_gradients_by_torch_func_are_refused():
    run_ranks(_transformed, 2)


class WeighedByItsGradient(nn.Module):
    """As class activation maps that are trained."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x):
        features = F.softplus(self.conv(F.softplus(self.stem(x))))
        scores = self.head(features.mean((2, 3)))
        (gradient,) = torch.autograd.grad(scores.logsumexp(1).sum(), features, create_graph=True)
        return self.stem(x) * (features * gradient.mean((2, 3), keepdim=True)).sum(1, keepdim=True).sigmoid()


class BetweenTwo(nn.Module):
    """Its own gradient goes on into what made the image that it is given."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        (gradient,) = torch.autograd.grad(self.conv(x).tanh().square().sum(), x, create_graph=True)
        return self.conv(x) * gradient


def _checkpointed(axes):
    def run(first, second):
        image = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(3)).double().requires_grad_()
        made = checkpoint(second, checkpoint(first, image, use_reentrant=False), use_reentrant=False)
        made.square().mean().backward()
        return [made.detach(), image.grad, *(one.grad for part in (first, second) for one in part.parameters())]

    torch.manual_seed(0)
    parts = WeighedByItsGradient().double(), BetweenTwo().double()
    wanted = run(*copy.deepcopy(parts))
    layout = make_layout(axes)
    got = run(*(torchtp.parallelize(part, layout, output="full") for part in parts))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_checkpoints_around_a_forward_that_takes_a_gradient(axes):
    """Which runs the forward again while that forward runs."""
    run_ranks(_checkpointed, math.prod(axes.values()), axes, backend="torchtp", timeout=60)
