"""Plain gradients that come back for cut tensors (people's own functions, hooks, sparse tensors) count as on a single device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from models import make_layout
from torch import nn

import torchtp
from torchtp.testing import run_ranks


class Tanh(torch.autograd.Function):
    """By numpy: plain out, plain back."""

    @staticmethod
    def forward(ctx, x):
        ctx.values = x.detach().numpy()
        return torch.from_numpy(ctx.values).tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - torch.from_numpy(ctx.values).tanh() ** 2)


class Energy(torch.autograd.Function):
    """By numpy: a number out."""

    @staticmethod
    def forward(ctx, x):
        ctx.values = x.detach().numpy()
        return torch.tensor((ctx.values**2).mean())

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.from_numpy(2 * ctx.values / ctx.values.size)


class TwiceByNumpyInBackward(torch.autograd.Function):
    """Cut out, plain back."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(grad.numpy() * 2)


class ProductByNumpy(torch.autograd.Function):
    """By numpy, of a cut tensor and a plain one of its shape."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.values = x.detach().numpy(), factor.detach().numpy()
        return torch.from_numpy(ctx.values[0] * ctx.values[1])

    @staticmethod
    def backward(ctx, grad):
        x, factor = ctx.values
        return grad * torch.from_numpy(factor), grad * torch.from_numpy(x)


def plain_like(y, w):
    return torch.arange(float(y.numel()), dtype=torch.float64).view(y.shape) / 100 * w.sum()


def beside_plain(then):
    def forward(y, w):
        plain = plain_like(y, w)
        return then(ProductByNumpy.apply(y, plain), y, plain)

    return forward


def clipped(y, w):
    h = y * 2
    h.register_hook(lambda grad: torch.from_numpy(grad.detach().numpy().clip(-1e-3, 1e-3)))
    return h + y.sin()


def halved_by_a_module(y, w):
    module = nn.Identity()
    module.register_full_backward_hook(lambda _, grads, __: (torch.from_numpy(grads[0].detach().numpy() * 0.5),))
    return module(y) + y.sin()


def similar_places(y, w):
    places = y[0].flatten(1).T
    similar = places @ places.T
    weights = torch.sparse.softmax((similar * (similar.detach() > 0.3)).to_sparse(), 1)
    return torch.sparse.mm(weights, places).T.reshape(1, *y.shape[1:]) + y


# Of a cut activation and a filter.
CASES = {
    "numpy": lambda y, w: Tanh.apply(y) + y,
    "numpy before a convolution": lambda y, w: F.conv2d(Tanh.apply(y), w, padding=1) + y,
    "numpy of pooled": lambda y, w: Tanh.apply(y.mean((2, 3)))[:, :, None, None] * y,
    "a number by numpy": lambda y, w: Energy.apply(y) * y,
    "numpy in backward": lambda y, w: TwiceByNumpyInBackward.apply(y) + y.sin(),
    "numpy of a plain one, too": beside_plain(lambda made, y, plain: made),
    "and the cut one again": beside_plain(lambda made, y, plain: made + y),
    "and the plain one again": beside_plain(lambda made, y, plain: made * plain + plain.exp()),
    "and both again": beside_plain(lambda made, y, plain: made * plain.sin() + y * plain + (y * plain.cos()).sum()),
    "clipped": clipped,
    "halved by a module": halved_by_a_module,
    "there and back": lambda y, w: y.to_sparse().to_dense() + y,
    "sparse sum": lambda y, w: torch.sparse.sum(y.relu().to_sparse(), (2, 3)).to_dense()[:, :, None, None] * y,
    "sparse values": lambda y, w: y.relu().to_sparse().coalesce().values().square().sum() * y,
    "sparse mask": lambda y, w: y.sparse_mask((y.detach() > 0).double().to_sparse()).to_dense() + y,
    "sparse attention": similar_places,
    "sparse filter": lambda y, w: F.conv2d(y, (w * (w.abs() > 0.1)).to_sparse().to_dense(), padding=1),
    "compressed matrix": lambda y, w: (w[:, :, 0, 0].to_sparse_csr() @ y[0].flatten(1)).sum() * y,
}


class Network(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case = case
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3) / 6)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.last(CASES[self.case](self.first(x), self.weight))


def step(network, image):
    network(image).square().mean().backward()
    return [torch.zeros(1) if p.grad is None else p.grad for p in network.parameters()]


def wrong_gradients(axes):
    layout, wrong = make_layout(axes), []
    for case in CASES:
        torch.manual_seed(0)
        single, image = Network(case).double(), torch.randn(2, 3, 8, 9).double()
        expected = step(single, image)
        got = step(torchtp.parallelize(copy.deepcopy(single), layout, output="full"), image)
        wrong += [
            (case, number)
            for number, (a, b) in enumerate(zip(got, expected, strict=True))
            if not torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        ]
    return wrong


@pytest.mark.parametrize("axes", [{"h": 2}, {"h": 2, "w": 2}, {"w": 3}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_plain_gradients_of_cut_tensors(axes):
    for wrong in run_ranks(wrong_gradients, torch.Size(axes.values()).numel(), axes, backend="torchtp"):
        assert wrong == []


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        y = self.first(x)
        return y.mean((2, 3)), y, self.second(y.relu())


def given(axes):
    """Gradients that are given for outputs, plain and cut ones."""
    layout = make_layout(axes)
    torch.manual_seed(0)
    single, image = Several().double(), torch.randn(2, 3, 8, 9).double()
    grads = [torch.randn_like(output) for output in single(image)]
    torch.autograd.backward(single(image), grads)
    network = torchtp.parallelize(copy.deepcopy(single), layout)
    network.zero_grad()
    torch.autograd.backward(network(image), [grads[0], grads[1], layout.shard(grads[2])])
    pairs = zip(network.parameters(), single.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize("axes", [{"h": 2}, {"h": 2, "w": 2}], ids=str)
def test_gradients_that_are_given_for_several_outputs(axes):
    assert all(run_ranks(given, torch.Size(axes.values()).numel(), axes, backend="torchtp"))
