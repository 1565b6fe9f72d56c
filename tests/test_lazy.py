"""Parameters that stay plain meet cut activations in every way models use them; gradients obey the mean rule."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import make_layout
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

import torchtp
from torchtp.parallel.lazy import Lazy
from torchtp.parallel.root import is_parallelized
from torchtp.testing import run_ranks

SHAPE = (2, 4, 5, 7)


def _parameter(*shape):
    return nn.Parameter(torch.randn(shape))


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = _parameter(4, 1, 1)

    def forward(self, x):
        return self.gamma * x + x * self.gamma.view(1, 4, 1, 1).sigmoid()


class Positions(nn.Module):
    """A parameter as large as the image: every rank uses its part."""

    def __init__(self):
        super().__init__()
        self.positions = _parameter(1, 4, 5, 7)
        self.rows = _parameter(5, 1)

    def forward(self, x):
        return (x + self.positions) * (1 + self.rows)


class Derived(nn.Module):
    """What is made of parameters alone, of parameters and plain tensors, and in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = _parameter(4, 1, 1), _parameter(4, 1, 1)
        self.scales = nn.ParameterList([_parameter(1), nn.Parameter(torch.tensor(0.7))])

    def forward(self, x):
        made = self.a * self.b + torch.arange(4, dtype=x.dtype).view(4, 1, 1)
        both = torch.stack([made, self.a.exp()])
        x = x * both[0] + both.mean(0)
        for scale in self.scales:
            x = x * scale
        return torch.where(x > self.a, x, self.b)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.without_bias = nn.Linear(6, 4, bias=False)
        self.weight = _parameter(4, 4)

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = self.without_bias(F.gelu(self.linear(x)))
        return F.linear(x, self.weight).permute(0, 3, 1, 2)


class Activation(nn.Module):
    def __init__(self):
        super().__init__()
        self.prelu = nn.PReLU(4)
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        return self.conv(self.prelu(x))


class WeightStandardised(nn.Conv2d):
    """timm's StdConv2d: the weight is normalised before it convolves."""

    def forward(self, x):
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = (self.weight - mean) / (self.weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, weight, self.bias)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(4, 1, 1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4, 1, 1))
        self.register_buffer("seen", torch.zeros(4, 1, 1))
        self.scale = _parameter(4, 1, 1)

    def forward(self, x):
        self.count += 1
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean((0, 2, 3)).view(4, 1, 1)
        self.average.mul_(0.5).add_(self.mean.detach())
        self.mean = self.mean * 0.9
        return (x - self.mean) * self.scale / self.count + self.average


class Replaced(nn.Module):
    """What is done to a parameter or a buffer itself, and what hangs on it."""

    def __init__(self):
        super().__init__()
        self.gamma, self.frozen = _parameter(4, 1, 1), _parameter(1)
        for name in ("mean", "seen", "ranges"):
            self.register_buffer(name, torch.ones(1))

    def forward(self, x):
        self.gamma.data = self.gamma.data.clamp(-0.3, 0.3)
        self.mean.data = x.detach().mean((0, 2, 3)).view(4, 1, 1)
        self.seen.data = x.detach()[:1]
        self.ranges.resize_(4, 1, 1).copy_(x.detach().amax((0, 2, 3)).view(4, 1, 1))
        self.frozen.requires_grad_(False)
        self.gamma.mask = getattr(self.gamma, "mask", torch.ones(4)) * torch.tensor([1.0, 0.0, 2.0, 3.0])
        return (x - self.mean) * self.gamma * self.gamma.mask.view(4, 1, 1) + self.ranges * self.frozen


class Tied(nn.Module):
    """One parameter on cut and on pooled activations, and as the weight of a convolution."""

    def __init__(self):
        super().__init__()
        self.weight = _parameter(4, 4, 1, 1)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        y = F.conv2d(x, self.weight)
        token = self.head(y.mean((2, 3))) @ self.weight.view(4, 4)
        return y * self.weight.mean() + token.view(2, 4, 1, 1)


class Canvases(nn.Module):
    """What is made of parameters is written into, in every way, and meets cut activations again."""

    def __init__(self):
        super().__init__()
        self.token, self.canvas = _parameter(1, 4, 1, 1), _parameter(2, 4, 5, 7)

    def forward(self, x):
        tokens = self.token.expand(x.shape).clone()
        tokens[:, :, 1:4, 2:6] = x[:, :, 1:4, 2:6]
        masked = self.token.expand(x.shape).clone()
        masked[x > 0] = x[x > 0]
        scaled = self.canvas * 2
        scaled *= x
        scaled.mul_(tokens).lerp_(x, torch.sigmoid(masked))
        several = [self.canvas.clone(), torch.zeros(x.shape, dtype=x.dtype)]
        torch._foreach_add_(several, [x, x * self.token])
        return (tokens + masked * scaled.index_add_(1, torch.tensor([0, 2]), x[:, 1:3])) * x + several[0] * several[1]


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate + x * gate * (1 - gate))


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Scaled(torch.autograd.Function):
    """Takes the derivative of what it has computed by itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            ctx.output = torch.tanh(ctx.inputs[0] * ctx.inputs[1])
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, grad):
        return torch.autograd.grad(ctx.output, ctx.inputs, grad)


class Functions(nn.Module):
    """Functions of the user's own take parameters, alone and beside cut activations."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (_parameter(4, 1, 1) for _ in range(3))

    def forward(self, x):
        return Scaled.apply(Swish.apply(x) * Swish.apply(self.a), self.b) + x * Negated.apply(self.c * 2)


MODULES = [LayerScale, Positions, Derived, Dense, Activation, Buffers, Replaced, Tied, Canvases, Functions]


def _compare(axes, make, num=1):
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    layout = make_layout(axes)
    torch.manual_seed(4)
    single = make().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout, reduce=False)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    mine, theirs = image.clone().requires_grad_(), image.clone().requires_grad_()
    for _ in range(2):
        output, expected = model(mine), single(theirs)
        torch.testing.assert_close(output.full_tensor(), expected, rtol=1e-10, atol=1e-10)
        output.full_tensor().square().sum().backward()
        expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)
    for (name, actual), wanted in zip(model.named_parameters(), single.parameters(), strict=True):
        if not wanted.requires_grad:
            assert not actual.requires_grad and actual.grad is None, name
            continue
        assert type(actual.grad) is torch.Tensor, name
        mean = actual.grad.clone()
        dist.all_reduce(mean, group=layout.group)
        mean /= layout.group.size()
        torch.testing.assert_close(mean, wanted.grad, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text)
    for (name, actual), wanted in zip(model.named_buffers(), single.buffers(), strict=True):
        assert type(actual) is torch.Tensor, name
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("make", [*MODULES], ids=lambda make: make.__name__)
@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}], ids=str)
def test_parameters_meet_cut_activations(axes, make):
    run_ranks(_compare, torch.Size(axes.values()).numel(), axes, make)


def _standardised():
    return WeightStandardised(4, 4, 3, padding=1)


def test_a_weight_that_is_computed_in_forward():
    run_ranks(_compare, 2, {"w": 2}, _standardised)


def _outside():
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(LayerScale(), layout)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(type(module.gamma)))
    inner = LayerScale.forward

    def forward(self, x):
        seen.append(type(self.gamma))
        assert isinstance(self.gamma, torch.Tensor) and not isinstance(self.gamma * 2, DTensor)
        return inner(self, x)

    LayerScale.forward = forward
    try:
        model(torch.zeros(SHAPE))
    finally:
        LayerScale.forward = inner
    assert seen == [Lazy, nn.Parameter]
    assert model.gamma is model._parameters["gamma"]
    replacement = nn.Parameter(torch.ones(4, 1, 1))
    model.gamma = replacement
    assert model.gamma is replacement and list(model.state_dict()) == ["gamma"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    del model.gamma
    assert not hasattr(model, "gamma")
    model.gamma = 2 * replacement.detach()
    assert list(model.parameters()) == [] and torch.equal(model.gamma, torch.full((4, 1, 1), 2.0))
    del model.gamma
    assert not hasattr(model, "gamma")


def test_outside_of_forward_a_parameter_is_itself():
    run_ranks(_outside, 2)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = _parameter(4, 1, 1)
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1))
        parametrize.register_parametrization(self.conv, "bias", nn.Tanh())
        self.linear = nn.Linear(4, 4)
        parametrize.register_parametrization(self.linear, "weight", Symmetric())
        parametrize.register_parametrization(self, "gamma", nn.Softplus())

    def forward(self, x):
        return self.linear(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * self.gamma


def _parametrizations_are_removed():
    torch.manual_seed(0)
    single = Parametrized().double()
    torch.manual_seed(0)
    model = torchtp.parallelize(Parametrized().double(), make_layout({"w": 2}), output="full")
    images = torch.randn(SHAPE).double()
    for each in (single, model):
        each(images).square().mean().backward()
        for module, name in ((each.conv, "weight"), (each.conv, "bias"), (each.linear, "weight"), (each, "gamma")):
            parametrize.remove_parametrizations(module, name)
    assert type(model.conv).__name__ == "Conv2d" and isinstance(model.conv, nn.Conv2d)
    assert torchtp.parallel.root.is_parallelized(model)
    assert list(model.state_dict()) == list(single.state_dict())
    for name, value in single.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    with torch.no_grad():
        torch.testing.assert_close(model(images), single(images))


def _pickled():
    model = torchtp.parallelize(nn.Sequential(LayerScale(), nn.ReLU()), make_layout({"w": 2}))
    part = pickle.loads(pickle.dumps(model[0]))
    copied = copy.deepcopy(torchtp.parallelize(LayerScale(), make_layout({"w": 2})))
    with pytest.raises(TypeError) as children:
        pickle.dumps(model)
    with pytest.raises(TypeError) as own_parameters:
        pickle.dumps(copied)
    same = torch.equal(part.gamma, model[0].gamma) and isinstance(part, LayerScale) and is_parallelized(copied)
    return same, str(children.value), str(own_parameters.value)


def test_a_part_can_be_pickled_and_of_the_whole_the_error_says_what_to_save():
    for same, *messages in run_ranks(_pickled, 2):
        assert same
        assert all("can't be pickled: save its state_dict()" in message for message in messages)


def test_parametrizations_can_be_removed_again():
    run_ranks(_parametrizations_are_removed, 2)


def _no_communication():
    warnings.simplefilter("error", torchtp.GatherWarning)
    layout = make_layout({"w": 2})
    for make in (LayerScale, Positions, Dense, Buffers):
        model = torchtp.parallelize(make(), layout)
        with torchtp.strict():
            output = model(torch.randn(SHAPE))
            output.to_local().sum().backward()


def test_parameters_bring_no_gather():
    run_ranks(_no_communication, 2)


def _double_backward():
    layout = make_layout({"w": 2})
    torch.manual_seed(4)
    single = nn.Sequential(LayerScale(), nn.Conv2d(4, 4, 3, padding=1), Dense(), LayerScale()).double()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full", reduce=False)
    results = []
    for each in (model, single):
        image = torch.linspace(-1, 1, 280, dtype=torch.float64).reshape(SHAPE).requires_grad_()
        (gradient,) = torch.autograd.grad(each(image).square().sum(), image, create_graph=True)
        gradient.square().sum().backward()
        results.append(image.grad)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        dist.all_reduce(mine.grad, group=layout.group)
        torch.testing.assert_close(mine.grad / layout.group.size(), theirs.grad, rtol=1e-9, atol=1e-10)


def test_double_backward_through_the_image():
    run_ranks(_double_backward, 2)
