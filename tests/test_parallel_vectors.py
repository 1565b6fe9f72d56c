"""Vectors and sequences that go in beside images: what made them outside the module trains exactly too."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import make_layout
from torch import nn
from torch.distributed.tensor import DTensor
from training import make_images

import torchtp
from torchtp.testing import run_ranks


class Conditioned(nn.Module):
    """A vector scales channels, also through parameters and in place; a sequence is looked at by every pixel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.shift = nn.Linear(4, 4)
        self.leave = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x, time, tokens):
        time *= 2
        y = self.conv(x) * time.view(-1, 4, 1, 1)
        y = F.silu(y + self.shift(time)[:, :, None, None])
        pixels = y.permute(0, 2, 3, 1)
        y = y + (torch.softmax(pixels @ tokens.transpose(1, 2)[:, None], -1) @ tokens[:, None]).permute(0, 3, 1, 2)
        return self.leave(y)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(3, 4)
        self.token = nn.Embedding(5, 4)

    def forward(self, time, tokens):
        return self.time(torch.tanh(time)), self.token(tokens)


def _batch(num):
    generator = torch.Generator().manual_seed(3)
    times = torch.randn(num, 3, dtype=torch.float64, generator=generator)
    return make_images(0, num)[..., :13], times, torch.arange(num * 3).view(num, 3) % 5


def _loss(model, encoder, batch):
    image, times, tokens = batch
    output = model(image, *encoder(times, tokens))
    return (output**2).mean()


def _networks():
    torch.manual_seed(0)
    return Conditioned().double(), Encoder().double()


def _single(num):
    model, encoder = _networks()
    _loss(model, encoder, _batch(num)).backward()
    return [parameter.grad for parameter in (*model.parameters(), *encoder.parameters())]


def _train(axes, outside):
    layout = make_layout(axes)
    expected = _single(layout.num_data)
    model, encoder = _networks()
    torchtp.parallelize(model, layout)
    wrapped = nn.parallel.DistributedDataParallel(encoder) if outside == "ddp" else encoder
    mine = slice(layout.data_rank, layout.data_rank + 1)
    _loss(model, wrapped, [whole[mine] for whole in _batch(layout.num_data)]).backward()
    gradients = [parameter.grad for parameter in (*model.parameters(), *encoder.parameters())]
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("axes", "outside"),
    [({"w": 2}, "plain"), ({"w": 3}, "plain"), ({"h": 2, "w": 2}, "plain"), ({"dp": 2, "w": 2}, "ddp")],
)
def test_an_encoder_outside_gets_the_whole_gradient(axes, outside):
    run_ranks(_train, torch.Size(axes.values()).numel(), axes, outside)


def _penalty(model, leaves, image):
    """The gradient of what is left of a gradient."""
    time, tokens = leaves
    grads = torch.autograd.grad((model(image, time * 1, tokens) ** 2).mean(), leaves, create_graph=True)
    return torch.autograd.grad(
        sum((grad**2).sum() for grad in grads), [*leaves, *model.parameters()], allow_unused=True
    )


def _twice():
    layout = make_layout({"w": 2})
    torch.manual_seed(1)
    leaves = [torch.randn(1, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4,), (3, 4))]
    single, _ = _networks()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    image = _batch(1)[0]
    expected, actual = _penalty(single, leaves, image), list(_penalty(model, leaves, image))
    for grad in actual[2:]:  # of parameters they are contributions to the mean
        if grad is not None:
            dist.all_reduce(grad)
            grad /= 2
    torch.testing.assert_close(actual, list(expected), rtol=1e-9, atol=1e-12)


def test_the_gradient_of_a_vectors_gradient():
    run_ranks(_twice, 2)


def _one_rank_freezes_its_encoder():
    layout = make_layout({"w": 2})
    model, encoder = _networks()
    torchtp.parallelize(model, layout)
    if dist.get_rank() == 1:
        encoder.token.requires_grad_(False)
    with pytest.raises(ValueError) as caught:
        _loss(model, encoder, _batch(1))
    encoder.requires_grad_(True)
    _loss(model, encoder, _batch(1)).backward()
    return str(caught.value)


def test_a_vector_that_takes_a_gradient_on_some_ranks_only():
    first, second = run_ranks(_one_rank_freezes_its_encoder, 2)
    assert first == second
    assert "rank 0 has a tensor that takes a gradient of shape (1, 3, 4)" in first
    assert "rank 1 has a tensor of shape (1, 3, 4)" in first


class TokensFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, tokens, x):
        cut = isinstance(self, torchtp.parallel.root.Root)
        assert isinstance(x, DTensor) == cut and not isinstance(tokens, DTensor)
        return self.conv(x) * tokens.mean(1)[:, :, None, None]


def _tokens_first():
    torch.manual_seed(0)
    single = TokensFirst().double()
    model = torchtp.parallelize(copy.deepcopy(single), make_layout({"w": 2}), output="full")
    inputs = torch.randn(1, 3, 4, dtype=torch.float64), _batch(1)[0]
    torch.testing.assert_close(model(*inputs), single(*inputs))


def test_images_are_those_with_the_most_dims():
    run_ranks(_tokens_first, 2)


class FromLatent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 2 * 4 * 4)
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, latent):
        return self.conv(self.first(latent).view(-1, 2, 4, 4))


def _without_an_image():
    layout = make_layout({"h": 1, "w": 2})
    torch.manual_seed(0)
    single = FromLatent().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    latent = torch.randn(2, 3, dtype=torch.float64)
    with pytest.warns(torchtp.UncutWarning, match="no argument of FromLatent is a tensor of an image's dims"):
        output = model(latent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(latent)  # said once
    torch.testing.assert_close(output, single(latent))
    (output**2).mean().backward()
    (single(latent) ** 2).mean().backward()
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (model, single)]
    torch.testing.assert_close(*gradients)


def test_a_model_without_an_image_is_exact_and_says_that_nothing_is_cut():
    run_ranks(_without_an_image, 2)


class Classifier(nn.Module):
    """On two axes its sequence is cut along the batch meanwhile, and so are what it is averaged to and the logits."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(2, 4, 2, 2)
        self.mix = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.mix(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def _logits(axes, num):
    torch.manual_seed(0)
    one = Classifier().double()
    cut = torchtp.parallelize(copy.deepcopy(one), make_layout(axes), output="local")
    images, classes = torch.randn(num, 2, 8, 8, dtype=torch.float64), torch.arange(num) % 3
    outputs = [model(images) for model in (one, cut)]
    for output in outputs:
        F.cross_entropy(output, classes).backward()
    errors = [(p.grad - q.grad).abs().max().item() for p, q in zip(one.parameters(), cut.parameters(), strict=True)]
    return (outputs[0] - outputs[1]).abs().max().item(), *errors


@pytest.mark.parametrize("axes", [{"h": 2}, {"h": 2, "w": 2}], ids=str)
@pytest.mark.parametrize("num", [2, 3])
def test_logits_are_whole_where_parts_are_given(axes, num):
    for errors in run_ranks(_logits, 2 * len(axes), axes, num):
        assert all(error < 1e-12 for error in errors)
