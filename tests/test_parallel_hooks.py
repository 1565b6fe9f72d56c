"""Hooks of users on the parameters of a parallelized module see the gradient of the whole batch, as on a single device."""

import copy

import pytest
import torch
from models import make_layout
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from training import assert_same_parameters

import torchtp
from torchtp.gradients import GradientReducer
from torchtp.testing import run_ranks

LAYOUTS = [{"w": 2}, {"h": 2}, {"dp": 2, "w": 1}, {"dp": 2, "w": 2}]


class _Scaled(nn.Module):
    """Meets activations as it is: its gradient comes back as one of a DTensor's."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0, 0.5, 1.5]).view(4, 1, 1))

    def forward(self, images):
        return images * self.gain


def _network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU(), nn.Conv2d(6, 4, 3, stride=2, padding=1)
    return nn.Sequential(*layers, _Scaled(), nn.Conv2d(4, 2, 1)).double()


def _images(step, layout):
    """The whole batch, and what this data rank has of it."""
    torch.manual_seed(100 + step)
    batch = torch.randn(2 * layout.num_data, 3, 9, 12, dtype=torch.float64)
    return batch, batch[2 * layout.data_rank : 2 * layout.data_rank + 2]


def _steps_in_backward(model, momentum=0.9):
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.05, momentum=momentum)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def _train_in_backward(axes):
    layout = make_layout(axes)
    single = _network()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    _steps_in_backward(single)
    _steps_in_backward(model)
    for step in range(4):
        whole, mine = _images(step, layout)
        single(whole).square().mean().backward()
        model(mine).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_parameters(model, single)


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_an_optimizer_that_steps_in_backward(axes):
    run_ranks(_train_in_backward, torch.Size(axes.values()).numel(), axes)


def _train_by_optimizers_of_pytorch(made_first):
    layout = make_layout({"dp": 2, "w": 1})
    single = _network()
    model = copy.deepcopy(single)
    models = (single, model) if made_first else (single,)
    for one in models:
        _apply_optimizer_in_backward(torch.optim.SGD, one.parameters(), {"lr": 0.05, "momentum": 0.9})
    reducer = GradientReducer(model)
    for step in range(4):
        whole, mine = _images(step, layout)
        single(whole).square().mean().backward()
        if not made_first and step == 0:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05, "momentum": 0.9})
            reducer.prepare()
        model(mine).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_parameters(model, single)


@pytest.mark.parametrize("made_first", [False, True])
def test_optimizers_that_pytorch_puts_into_backward_step_on_what_is_reduced(made_first):
    run_ranks(_train_by_optimizers_of_pytorch, 2, made_first)


def _clamp(grad):
    return grad.clamp(-1e-3, 1e-3)


def _clamp_in_place(grad):
    grad.clamp_(-1e-3, 1e-3)


def _hook_all(model, hook, kept):
    for name, parameter in model.named_parameters():
        parameter.register_hook(hook)
        parameter.register_hook(lambda grad, name=name: kept.setdefault(name, []).append(grad))


def _train_clamped(axes, hook, set_to_none, num_accumulated):
    layout = make_layout(axes)
    single = _network()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    seen, wanted = {}, {}
    _hook_all(single, hook, wanted)
    _hook_all(model, hook, seen)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (single, model)]
    for step in range(6):
        whole, mine = _images(step, layout)
        single(whole).square().mean().backward()
        model(mine).square().mean().backward()
        if step % num_accumulated == num_accumulated - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    assert_same_parameters(model, single)
    assert seen.keys() == wanted.keys()
    for name, gradients in seen.items():
        torch.testing.assert_close(gradients, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("hook", "num_accumulated", "set_to_none"),
    [(_clamp, 1, True), (_clamp_in_place, 1, False), (_clamp, 3, False), (_clamp_in_place, 3, True)],
)
@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "w": 2}], ids=str)
def test_hooks_that_change_a_gradient(axes, hook, num_accumulated, set_to_none):
    run_ranks(_train_clamped, torch.Size(axes.values()).numel(), axes, hook, set_to_none, num_accumulated)


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = _network()

    def encode(self, images):
        return self.layers[:4](images)

    def forward(self, images):
        return self.layers[4:](self.encode(images))


def _kept_by_a_hook(model, images):
    kept = []
    handle = model.layers[3].register_forward_hook(lambda module, images, output: kept.append(output))
    model(images)
    handle.remove()
    return kept[0]


def _of_a_method(model, images):
    model(images)
    return model.encode(images)


def _train_on_features(axes, features):
    layout = make_layout(axes)
    torch.manual_seed(0)
    single = _Encoder()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    seen, wanted = {}, {}
    _hook_all(single, _clamp, wanted)
    _hook_all(model, _clamp, seen)
    for step in range(3):
        whole, mine = _images(step, layout)
        features(single, whole).square().mean().backward()
        features(model, mine).square().mean().backward()
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
        if step == 0:  # the next ones are added up
            single.zero_grad()
            model.zero_grad()
    assert len(wanted["layers.0.weight"]) == 3
    torch.testing.assert_close(seen, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("features", [_kept_by_a_hook, _of_a_method])
@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "w": 2}], ids=str)
def test_hooks_in_a_backward_that_passes_no_output(axes, features):
    run_ranks(_train_on_features, torch.Size(axes.values()).numel(), axes, features)


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)

    def forward(self, images, takes_second):
        return self.second(images) if takes_second else self.first(images)


def _a_branch_each(set_to_none):
    layout = make_layout({"dp": 2, "w": 1})
    torch.manual_seed(0)
    single = _Branches().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    calls, wanted_calls = [], []
    for each, list_of_calls in ((single, wanted_calls), (model, calls)):
        for name, parameter in each.named_parameters():
            parameter.register_hook(_clamp)
            parameter.register_post_accumulate_grad_hook(lambda _, n=name, c=list_of_calls: c.append(n))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (single, model)]
    for step, takes_second in enumerate([(False, True), (False, False), (True, True), (True, False)]):
        whole, mine = _images(step, layout)
        loss = sum(single(whole[2 * r : 2 * r + 2], takes_second[r]).square().mean() for r in range(2)) / 2
        loss.backward()
        model(mine, takes_second[layout.data_rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert_same_parameters(model, single)
    assert sorted(calls) == sorted(wanted_calls)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_hooks_run_on_a_rank_that_adds_nothing_to_the_gradient(set_to_none):
    """With gradients of zero kept, those of a parameter that no rank has used stay zero: nothing runs."""
    run_ranks(_a_branch_each, 2, set_to_none)


def _hook_of_one_rank():
    layout = make_layout({"w": 2})
    single = _network()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    norms = []
    if layout.group.rank() == 0:
        model[0].weight.register_hook(lambda grad: norms.append(grad.norm()))
    for step in range(2):
        whole, mine = _images(step, layout)
        single(whole).square().mean().backward()
        model(mine).square().mean().backward()
    for name, parameter in single.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)
    assert len(norms) == (2 if layout.group.rank() == 0 else 0)


def test_a_hook_of_one_rank_that_only_looks():
    run_ranks(_hook_of_one_rank, 2)


def _locals_see_contributions():
    """Under no_sync nothing is averaged yet: hooks run at once, on what this rank adds, and are not run again later."""
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(_network(), layout, output="full")
    calls = []
    model[0].weight.register_hook(lambda grad: calls.append("gradient"))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    loss_of = lambda step: model(_images(step, layout)[1]).square().mean()  # noqa: E731
    loss_of(0).backward()
    assert calls == ["gradient", "accumulated"]
    with torchtp.no_sync(model):
        loss_of(1).backward()
    assert calls == ["gradient", "accumulated"] * 2
    loss_of(2).backward()
    assert calls == ["gradient", "accumulated"] * 3


def _pass_often():
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(_network(), layout, output="full")
    calls = []
    model[0].weight.register_hook(lambda grad: calls.append(grad))
    for step in range(40):  # if each left a hook more for each there is, this would not end
        model(_images(step, layout)[1]).square().mean().backward()
    return len(calls)


def test_hooks_stay_as_many_as_they_are():
    assert run_ranks(_pass_often, 2) == [40, 40]


def test_hooks_run_once_a_backward_also_under_no_sync():
    run_ranks(_locals_see_contributions, 2)


def _failures():
    """What raises in a hook raises in backward; what raises in backward leaves hooks where they were."""
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(_network(), layout, output="full")
    calls, fails = [], True

    def hook(_):
        if fails:
            raise KeyError("a hook")
        calls.append("accumulated")

    model[0].weight.register_post_accumulate_grad_hook(hook)
    model[0].weight.register_hook(lambda grad: calls.append("gradient"))
    with pytest.raises(KeyError, match="a hook"):
        model(_images(0, layout)[1]).square().mean().backward()
    model.zero_grad()
    fails = False
    removed = model[3].weight.register_hook(lambda grad: 1 / 0)
    bias_hook = model[0].bias.register_hook(lambda grad: calls.append("bias"))
    output = model(_images(1, layout)[1])
    output.register_hook(_broken)
    with pytest.raises(ValueError, match="broken"):
        output.square().mean().backward()
    removed.remove()
    bias_hook.remove()
    model.zero_grad()
    calls.clear()
    model(_images(2, layout)[1]).square().mean().backward()
    assert calls == ["gradient", "accumulated"]


def _broken(_):
    raise ValueError("broken")


def test_hooks_after_a_failure():
    run_ranks(_failures, 2)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


class _Ignored(nn.Module):
    """A function of its parameter that gives it no gradient."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return _Nothing.apply(self.layer(x), self.weight)


def _hooks_without_gradient():
    told = []
    for reduced in (False, True):
        model, seen = _Ignored(), []
        reducer = GradientReducer(model) if reduced else None
        model.weight.register_hook(lambda grad, seen=seen: seen.append(grad))
        for _ in range(2):
            output = model(torch.ones(2, 3))
            if reducer:
                reducer.watch(output)
            output.sum().backward()
        told.append((seen, model.weight.grad))
    return told


def test_a_hook_is_told_where_no_gradient_came():
    for plain, reduced in run_ranks(_hooks_without_gradient, 2):
        assert plain == reduced and plain[0]
