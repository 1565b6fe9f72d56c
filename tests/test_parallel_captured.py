"""Gradients that are not accumulated: of torch.autograd.grad, and through parameters that were computed."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from models import make_layout
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from training import assert_same_parameters

import torchtp
from torchtp.testing import run_ranks

LAYOUTS = [{"w": 2}, {"h": 2, "w": 2}, {"dp": 2, "w": 2}]


class _Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.BatchNorm2d(6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Conv2d(6, 2, 3, padding=1, stride=2)
        self.gain = nn.Parameter(torch.tensor([1.5, 0.7]).view(2, 1, 1))
        self.unused = nn.Parameter(torch.ones(3))

    def encode(self, images):
        return self.body(images)

    def forward(self, images):
        features = self.norm(self.body(images).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(features) * self.gain


def _networks(axes, **options):
    torch.manual_seed(0)
    layout = make_layout(axes)
    single = _Network().double()
    return layout, single, torchtp.parallelize(copy.deepcopy(single), layout, **options)


def _images(step, layout):
    """What this data rank has."""
    torch.manual_seed(100 + 7 * step + layout.data_rank)
    return torch.randn(2, 3, 9, 11, dtype=torch.float64)


def _loss(output):
    return output.square().mean()


def _whole(output):
    return output.full_tensor() if isinstance(output, DTensor) else output


def _used(model):
    return [parameter for name, parameter in model.named_parameters() if name != "unused"]


def _taken(axes, options):
    layout, single, model = _networks(axes, **options)
    for step in range(2):
        images = _images(step, layout)
        wanted = torch.autograd.grad(_loss(single(images)), list(single.parameters()), allow_unused=True)
        loss = _loss(_whole(model(images)))
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-12)
        assert all(parameter.grad is None for parameter in model.parameters())
        # Hooks see what is given, and may change it.
        handle = model.head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        clamped = torch.autograd.grad(_loss(_whole(model(images))), [model.head.weight])
        index = [name for name, _ in model.named_parameters()].index("head.weight")
        torch.testing.assert_close(clamped[0], wanted[index].clamp(-1e-3, 1e-3), rtol=1e-9, atol=1e-12)
        handle.remove()
        _loss(_whole(model(images))).backward()
        model.zero_grad()


@pytest.mark.parametrize("options", [{"output": "full"}, {}, {"output": "full", "reduce": False}], ids=str)
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_gradients_that_are_taken_are_those_of_the_images_of_this_data_rank(axes, options):
    run_ranks(_taken, torch.Size(axes.values()).numel(), axes, options)


def _of_feature(network, images, used):
    kept = []
    with network.body.register_forward_hook(lambda *call: kept.append(call[-1])):
        network(images)
    return torch.autograd.grad(_loss(kept[0]), used[1:5])


def _of_gradients(network, images, used):
    """Of which no value of the output is left."""
    taken = torch.autograd.grad(_whole(network(images)).mean(), used, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in taken), used[:2])


def _of_gradient_of_images(network, images, used):
    images = images.clone().requires_grad_()
    (taken,) = torch.autograd.grad(_whole(network(images)).sum(), images, create_graph=True)
    return torch.autograd.grad(taken.square().sum(), used[:3])


def _through_a_step(network, images, used):
    names = [name for name, _ in network.named_parameters() if name != "unused"]
    taken = torch.autograd.grad(_loss(_whole(network(images))), used, create_graph=True)
    moved = {name: one - 0.1 * each for name, one, each in zip(names, used, taken, strict=True)}
    return torch.autograd.grad(_loss(_whole(functional_call(network, moved, (images,)))), used)


def _of_two_calls(network, images, used):
    moved = {name: one + 0.1 for name, one in network.named_parameters()}
    losses = _loss(_whole(network(images))), _loss(_whole(functional_call(network, moved, (images,))))
    return torch.autograd.grad(sum(losses), used)


def _of_method(network, images, used):
    return torch.autograd.grad(_loss(network.encode(images)), used[1:5])


def _of_weights_alone(network, images, used):
    """Which one rank may do without the others."""
    if dist.get_rank() == 0:
        torch.autograd.grad(used[0].square().sum(), used[0])
    return torch.autograd.grad(_loss(_whole(network(images))) + used[0].square().sum(), used)


WAYS = [
    _of_feature,
    _of_gradients,
    _of_gradient_of_images,
    _through_a_step,
    _of_two_calls,
    _of_method,
    _of_weights_alone,
]


def _taken_of(axes, take, reduce):
    layout, single, model = _networks(axes, reduce=reduce)
    for step in range(2):
        images = _images(step, layout)
        given = layout.shard(images) if take is _of_method else images
        wanted, taken = (take(each, x, _used(each)) for each, x in ((single, images), (model, given)))
        torch.testing.assert_close(taken, wanted, rtol=1e-9, atol=1e-12)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("take", WAYS, ids=lambda take: take.__name__.strip("_"))
def test_gradients_that_are_taken_past_the_output(take, reduce):
    run_ranks(_taken_of, 4, {"dp": 2, "w": 2} if reduce else {"h": 2, "w": 2}, take, reduce)


def _penalize(axes):
    layout, single, model = _networks(axes)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (single, model)]
    for step in range(3):
        images = _images(step, layout)
        for each in (single, model):
            each.zero_grad()
            loss = _loss(each(images))
            gradients = torch.autograd.grad(loss, _used(each), create_graph=True)
            (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_parameters(model, single)


@pytest.mark.parametrize("axes", LAYOUTS[:2], ids=str)
def test_a_penalty_on_the_gradient_of_the_parameters(axes):
    run_ranks(_penalize, torch.Size(axes.values()).numel(), axes)


def _meta_step(model, images):
    """MAML: two steps of fast weights, and the gradient of the parameters through them."""
    weights = dict(model.named_parameters())
    for step in range(2):
        names = [name for name in weights if name != "unused"]
        loss = _loss(functional_call(model, weights, (images[step],)))
        gradients = torch.autograd.grad(loss, [weights[name] for name in names], create_graph=True)
        for name, gradient in zip(names, gradients, strict=True):
            weights[name] = weights[name] - 0.1 * gradient
    return _loss(functional_call(model, weights, (images[2],)))


def _meta_learn(axes):
    layout, single, model = _networks(axes, output="full")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (single, model)]
    for step in range(3):
        images = [_images(3 * step + number, layout) for number in range(3)]
        losses = []
        for each in (single, model):
            each.zero_grad()
            losses.append(_meta_step(each, images))
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
        for parameter, theirs in zip(_used(model), _used(single), strict=True):
            torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-8, atol=1e-11)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_parameters(model, single)
    model(_images(9, layout)).sum().backward()  # and on, without


@pytest.mark.parametrize("axes", LAYOUTS[:2], ids=str)
def test_learning_to_learn(axes):
    run_ranks(_meta_learn, torch.Size(axes.values()).numel(), axes)


def _hypernetwork(axes, reduce):
    """Parameters that another module computes from the first step on; its gradients are those of this data rank."""
    layout, single, model = _networks(axes, output="full", reduce=reduce)
    torch.manual_seed(1)
    maker = nn.Linear(4, sum(p.numel() for p in single.parameters())).double()
    context = torch.randn(4, dtype=torch.float64)

    def gradients(each):
        maker.zero_grad()
        sizes = [p.numel() for p in each.parameters()]
        parts = maker(context).split(sizes)
        weights = {n: part.view_as(p) for (n, p), part in zip(each.named_parameters(), parts, strict=True)}
        _loss(functional_call(each, weights, (_images(0, layout),))).backward()
        return [p.grad.clone() for p in maker.parameters()]

    for _ in range(2):
        torch.testing.assert_close(gradients(model), gradients(single), rtol=1e-9, atol=1e-12)
    assert all(isinstance(p, nn.Parameter) and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_parameters_that_another_module_computes(axes, reduce):
    run_ranks(_hypernetwork, torch.Size(axes.values()).numel(), axes, reduce)


def _surgery(axes):
    """Gradients of two losses, put together by hand (PCGrad)."""
    layout, single, model = _networks(axes, output="full")
    for each in (single, model):
        output = each(_images(0, layout))
        losses = output[:, 0].square().mean(), output[:, 1].abs().mean()
        first, second = (torch.autograd.grad(loss, _used(each), retain_graph=True) for loss in losses)
        for parameter, a, b in zip(_used(each), first, second, strict=True):
            dot = (a * b).sum()
            parameter.grad = a + b - (dot.clamp(max=0) / b.square().sum()) * b
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same_parameters(model, single)


@pytest.mark.parametrize("axes", LAYOUTS[:2], ids=str)
def test_gradients_that_are_put_together_by_hand(axes):
    run_ranks(_surgery, torch.Size(axes.values()).numel(), axes)


def _differentiate_thrice(axes):
    layout, single, model = _networks(axes, output="full")
    if torch.__version__ >= (2, 15):  # whose batch norm has no third derivative
        single.body[3], model.body[3] = nn.Identity(), nn.Identity()
    images = _images(0, layout)
    orders = []
    for each in (single, model):
        value, used = _loss(each(images)), _used(each)
        orders.append([])
        for _ in range(3):
            grads = torch.autograd.grad(value, used, create_graph=True)
            value = sum(grad.square().sum() for grad in grads)
            orders[-1] += [grad.detach() for grad in grads]
    for expected, grad in zip(*orders, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-9 * expected.abs().max().item())


@pytest.mark.parametrize("axes", LAYOUTS[:2], ids=str)
def test_third_derivatives(axes):
    run_ranks(_differentiate_thrice, 4 if "h" in axes else 2, axes)


def _own_beside_others(stand_in):
    layout, single, model = _networks({"dp": 2, "w": 2}, output="full")
    for step in range(3):
        for network in (single, model):
            network.zero_grad()
            weight = network.head.weight.detach() + 0.1
            others = {"head.weight": nn.Parameter(weight) if stand_in == "a parameter" else weight.requires_grad_()}
            losses = []
            for data_rank in [layout.data_rank] if network is model else [0, 1]:
                torch.manual_seed(100 + 7 * step + data_rank)
                images = torch.randn(2, 3, 9, 11, dtype=torch.float64)
                own = _loss(network(images)) if step > 0 else 0.0
                losses.append(own + _loss(functional_call(network, others, (images,))))
            (sum(losses) / len(losses)).backward()
        for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stand_in", ["a parameter", "a tensor"])
def test_own_parameters_are_averaged_whatever_stands_in_for_others(stand_in):
    run_ranks(_own_beside_others, 4, stand_in)


class _Generator(nn.Module):
    """Gives out the style that it has made beside its image, and keeps what that became."""

    def __init__(self):
        super().__init__()
        self.style, self.conv = nn.Linear(5, 4), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images, latents):
        style = self.style(latents)
        self.kept = style.tanh()
        self.met = self.kept[:, :, None, None].exp()
        return (self.conv(images) * self.met).tanh(), style


WHICH = {
    "style": lambda network, style: [style],
    "kept": lambda network, style: [network.kept],
    "all, and a parameter": lambda network, style: [style, network.conv.weight, network.met, network.kept],
}


def _gradients_of_made(network, which, latents, accumulates):
    torch.manual_seed(1)
    images, latents = torch.randn(2, 3, 9, 13).double(), latents.double()
    image, style = network(images, latents)
    inputs = WHICH[which](network, style)
    if accumulates:
        image.square().sum().backward(inputs=inputs)
        return [one.grad.clone() for one in inputs]
    taken = torch.autograd.grad(image.square().sum(), inputs, create_graph=True)
    edges = [torch.autograd.graph.get_gradient_edge(one) for one in inputs if one.grad_fn is not None]
    again = torch.autograd.grad(image.square().sum(), edges, retain_graph=True)
    penalty = sum(one.square().sum() for one in taken).sqrt() + image.mean()
    penalty.backward()
    return [*(one.detach() for one in taken), *again, *(parameter.grad for parameter in network.parameters())]


def _gradients_that_come_back(network, latents):
    """To what is put on tensors that a forward has given out."""
    torch.manual_seed(1)
    images, seen = torch.randn(2, 3, 9, 13).double(), []
    image, style = network(images, latents.double())
    style.retain_grad()
    style.register_hook(seen.append)
    (image.square().sum() + style.exp().sum()).backward()
    return [style.grad, *seen, *(parameter.grad for parameter in network.parameters())]


def _made_in_forward(axes, output):
    layout = make_layout(axes)
    torch.manual_seed(0)
    single, latents = _Generator().double(), torch.randn(2, 5)
    model = torchtp.parallelize(copy.deepcopy(single), layout, output=output)
    wanted = _gradients_that_come_back(single, latents)
    torch.testing.assert_close(_gradients_that_come_back(model, latents), wanted, rtol=1e-9, atol=1e-12)
    for which in WHICH:
        for accumulates in (False, True):
            torch.manual_seed(0)
            single, latents = _Generator().double(), torch.randn(2, 5)
            model = torchtp.parallelize(copy.deepcopy(single), layout, output=output)
            wanted = _gradients_of_made(single, which, latents, accumulates)
            torch.testing.assert_close(
                [_whole(one) for one in _gradients_of_made(model, which, latents, accumulates)],
                wanted,
                rtol=1e-9,
                atol=1e-12,
                msg=lambda text, of=(which, accumulates): f"{of}: {text}",
            )


@pytest.mark.parametrize("output", ["full", "dtensor"])
@pytest.mark.parametrize("axes", [{"w": 3}, {"h": 2, "w": 2}], ids=str)
def test_gradients_of_what_a_forward_made_and_gave_out(axes, output):
    """A penalty on the length of paths, of StyleGAN2: of plain tensors that are no parameters."""
    run_ranks(_made_in_forward, math.prod(axes.values()), axes, output, backend="torchtp", timeout=60)
