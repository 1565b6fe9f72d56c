"""Weights, biases and templates that a network makes of its cut activations: exact, or refused."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from torch import nn
from training import assert_same_gradients, loss_of, make_images

import torchtp
from torchtp.testing import run_ranks


class Maker(nn.Module):
    """Gives `use` an image, a vector made of another one, and itself."""

    def __init__(self, use):
        super().__init__()
        self.use = use
        self.look = nn.Conv2d(2, 4, 3, padding=1)
        self.make = nn.Linear(4, 144)
        self.own = nn.BatchNorm2d(4)  # its parameters stay plain while forward runs, those of this module do not
        self.weight = nn.Parameter(torch.linspace(-0.2, 0.3, 144).view(4, 4, 3, 3))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.canvas = nn.Parameter(torch.linspace(-1, 1, 4 * 13 * 17).view(1, 4, 13, 17))

    def forward(self, x, other):
        other = self.look(other)
        return self.use(self, self.look(x), other, other.mean((0, 2, 3)))


CASES = {
    "a kernel of a made and a plain tensor": lambda m, x, z, v: F.conv2d(x, m.make(v).view(4, 4, 3, 3), m.own.bias),
    "a kernel of a made tensor and a parameter": lambda m, x, z, v: F.conv2d(x, m.make(v).view(4, 4, 3, 3), m.scale),
    "a bias of a convolution": lambda m, x, z, v: F.conv2d(x, m.weight, v, padding=1),
    "a bias of a batch norm": lambda m, x, z, v: F.batch_norm(x, None, None, m.scale, v, True),
    "a bias of a group norm": lambda m, x, z, v: F.group_norm(x, 2, m.scale, v),
    "a bias of a layer norm": lambda m, x, z, v: F.layer_norm(x.permute(0, 2, 3, 1), (4,), m.own.weight, v),
    "a bias of a layer norm alone": lambda m, x, z, v: F.layer_norm(x.permute(0, 2, 3, 1), (4,), None, v),
    "a kernel over what is whole": lambda m, x, z, v: x + F.conv2d(m.canvas, m.make(v).view(4, 4, 3, 3), padding=1),
    "a kernel over what was born in forward": lambda m, x, z, v: (
        x + F.conv2d(torch.linspace(0, 1, 221).double().view(1, 1, 13, 17), m.make(v)[:36].view(4, 1, 3, 3), padding=1)
    ),
    "a bias over what is whole": lambda m, x, z, v: x * F.conv2d(m.canvas, m.weight, v, padding=1),
    "a template": lambda m, x, z, v: F.conv2d(x, z[:, :, 3:8, 6:11]),
    "a template for each image": lambda m, x, z, v: F.conv2d(
        x.reshape(1, 8, 13, 17), z[:, :, 3:8, 6:11].reshape(8, 1, 5, 5), groups=8
    ),
}


class Experts(nn.Module):
    """Each image goes through the one of four convolutions that its mean picks."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(2, 4, bias=False)
        self.experts = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))

    def forward(self, x):
        weights = self.gate(x.mean((2, 3))).softmax(1)
        best = weights.topk(1).indices
        picked = torch.zeros_like(weights).scatter_(1, best, weights.gather(1, best))
        return x + sum(expert(x) * picked[:, i : i + 1, None, None] for i, expert in enumerate(self.experts))


def _train_experts(axes):
    layout = make_layout(axes)
    torch.manual_seed(2)
    single = Experts().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    for each in (single, model):
        loss_of(each(make_images(0, 2))).backward()
    assert_same_gradients(model, single)


@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}], ids=str)
def test_one_expert_an_image(axes):
    run_ranks(_train_experts, 4 if "h" in axes else 2, axes)


class LowerBound(torch.autograd.Function):
    """At least a bound, with a gradient above it, and below it where that leads up: which of both a part of a gradient can't tell."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x, torch.as_tensor(bound, dtype=x.dtype))
        return x.clamp(min=bound)

    @staticmethod
    def backward(ctx, grad):
        x, bound = ctx.saved_tensors
        return ((x >= bound) | (grad < 0)) * grad * (1 + grad.abs()), None


def _hooked(tensor, bound):
    made = tensor * 1.0
    made.register_hook(lambda grad: grad.clamp(-bound * 1e-2, bound * 1e-2))
    return made


LIMITS = {"functions": LowerBound.apply, "hooks": _hooked}


class Bounded(nn.Module):
    def __init__(self, use, limit):
        super().__init__()
        self.use, self.limit = use, limit
        self.look = nn.Conv2d(2, 4, 3, padding=1)
        self.kernel = nn.Parameter(torch.linspace(-0.5, 0.6, 16).view(4, 4)[:, [2, 0, 3, 1]])
        self.vector = nn.Parameter(torch.tensor([-0.3, 0.4, -0.1, 0.2]))

    def forward(self, x):
        return self.use(self.look(x), self.limit(self.kernel, 0.05), self.limit(self.vector, 0.1))


BOUNDED = {
    "a kernel and a bias": lambda x, w, v: F.conv2d(x, w[:, :, None, None], v).sin(),
    "a kernel after more": lambda x, w, v: F.conv2d(x, (w * 2).t()[:, :, None, None]).sin() + v.view(4, 1, 1),
    "factors": lambda x, w, v: x * v.view(4, 1, 1) * w.sum(0).view(4, 1, 1) + w.mean(),
    "a linear layer": lambda x, w, v: F.linear(x.permute(0, 2, 3, 1), w, v).sin(),
    "a product": lambda x, w, v: torch.einsum("oc,nchw->nohw", w, x).sin() * v.view(4, 1, 1),
    "norms": lambda x, w, v: F.group_norm(F.batch_norm(x, None, None, v, w[0], True), 2, w[1], v).sin(),
    "a layer norm": lambda x, w, v: F.layer_norm(x.permute(0, 2, 3, 1), (4,), v, w[2]).sin(),
    "an end and a picture": lambda x, w, v: (
        torch.cat([x, v.view(1, 4, 1, 1).expand(x.size(0), 4, *x.shape[2:])], 1) * w.sum()
    ),
}


def _train_bounded(use, limit, axes):
    layout = make_layout(axes)
    torch.manual_seed(2)
    single = Bounded(BOUNDED[use], LIMITS[limit]).double()
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    for each in (single, model):
        (loss_of(each(make_images(0, 2))) + each.kernel.square().sum()).backward()
    assert_same_gradients(model, single)


@pytest.mark.parametrize("limit, axes", [*product(LIMITS, [{"w": 2}]), ("functions", {"h": 2, "w": 2})], ids=str)
@pytest.mark.parametrize("use", BOUNDED)
def test_backwards_and_hooks_of_peoples_own_get_gradients_not_contributions(use, limit, axes):
    run_ranks(_train_bounded, 4 if "h" in axes else 2, use, limit, axes)


REFUSED = {
    "convolution": lambda m, x, z, v: F.conv2d(x, m.look.weight.expand(4, 2, 3, 3).repeat(1, 2, 1, 1), v),
    "native_batch_norm": lambda m, x, z, v: F.batch_norm(x, None, None, None, v, True),
}


def _train(model):
    images = [make_images(step, 2).requires_grad_() for step in range(2)]
    output = model(*images)
    loss_of(output).backward()
    parameters = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [output.detach(), *(image.grad for image in images)], parameters


def _run(name, axes):
    torch.manual_seed(0)
    single = Maker(CASES[name]).double()
    model = torchtp.parallelize(copy.deepcopy(single), make_layout(axes), output="full")
    torch.testing.assert_close(_train(model), _train(single), rtol=1e-9, atol=1e-11)
    with torch.inference_mode():
        torch.testing.assert_close(model(*images()), single(*images()), rtol=1e-9, atol=1e-11)


def images():
    return make_images(3, 2), make_images(4, 2)


@pytest.mark.parametrize("axes", [{"w": 2}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_is_made_of_cut_activations_trains_exactly(name, axes):
    run_ranks(_run, torch.Size(axes.values()).numel(), name, axes)


def _refuse(name):
    torch.manual_seed(0)
    model = torchtp.parallelize(Maker(REFUSED[name]).double(), make_layout({"w": 2}))
    with pytest.raises(NotImplementedError, match=rf"aten.{name}.default: the bias was made of cut activations"):
        model(*images())
    with torch.no_grad():
        model(*images())


@pytest.mark.parametrize("name", REFUSED)
def test_a_made_bias_beside_a_plain_weight_is_refused(name):
    run_ranks(_refuse, 2, name)


class AsParameters(nn.Module):
    """Asks what they are, and makes and names some in forward."""

    def __init__(self):
        super().__init__()
        self.gamma, self.places = nn.Parameter(torch.full((4, 1, 1), 3.0)), nn.Parameter(torch.rand(4, 2, 2))
        self.register_parameter("scale", None)
        self.register_buffer("seen", torch.zeros(4, 1, 1))

    def forward(self, x):
        if self.scale is None:
            self.places = nn.Parameter(F.interpolate(self.places[None], x.shape[-2:])[0])
            self.scale, self.other = nn.Parameter(1 / x.std((0, 2, 3))[:, None, None]), self.gamma
            self.seen.set_(self.gamma.detach() + 1)
        assert not isinstance(self.seen, nn.Parameter) and not isinstance(self.gamma * 2, nn.Parameter)
        return x * self.scale * (self.gamma if isinstance(self.gamma, nn.Parameter) else 1) + self.places + self.seen


def _as_parameters():
    image = torch.randn(2, 4, 5, 7)
    single = AsParameters()
    model = torchtp.parallelize(copy.deepcopy(single), make_layout({"w": 2}), output="full")
    for each in (single, model):
        with torch.no_grad():
            each(image)
        each(image).square().sum().backward()
    assert model.other is model.gamma
    state, wanted = (each.state_dict(keep_vars=True) for each in (model, single))
    for name, other in wanted.items():
        value = state[name]
        assert type(value) is type(other), name
        torch.testing.assert_close(value, other)
        torch.testing.assert_close(value.grad, other.grad)


def test_parameters_are_parameters_to_a_forward():
    run_ranks(_as_parameters, 2)
