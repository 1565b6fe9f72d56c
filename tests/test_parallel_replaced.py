"""parallelize: parameters and parts of a module that are replaced or added, before and while it is trained."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from models import make_layout, make_network
from test_parallel import Scaled
from torch import nn
from training import assert_same_gradients, assert_same_parameters, loss_of, make_images, make_optimizer, whole

import torchtp
from torchtp.testing import run_ranks


def _replaced():
    layout = make_layout({"w": 2})
    single, model = make_network("convnext"), make_network("convnext")
    torchtp.parallelize(model, layout)
    for each in (single, model):
        torch.manual_seed(8 + (layout.group.rank() if each is model else 0))
        each[3] = nn.Sequential(nn.Conv2d(4, 2, 1), Scaled(), nn.Conv2d(2, 1, 1)).double()
        loss_of(each(make_images(0, 1))).backward()
    assert_same_parameters(model, single)
    assert_same_gradients(model, single)
    model[1].drop = nn.Identity()  # nothing to train
    model[2].frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    loss_of(model(make_images(0, 1))).backward()
    if layout.group.rank() == 1:
        model[0].bias = nn.Parameter(model[0].bias.detach().clone())
    with pytest.raises(ValueError, match=r"'0.bias' has replaced another one.*on some ranks alone.*\(on rank 1\)"):
        model(make_images(0, 1))


def test_parts_may_be_replaced_before_training_alike_on_all_ranks():
    run_ranks(_replaced, 2)


def _grows():
    layout = make_layout({"dp": 2, "w": 2})
    single, model = make_network("convnext"), make_network("convnext")
    torchtp.parallelize(model, layout, output="full")
    optimizers = [make_optimizer(each) for each in (single, model)]
    channels = single(make_images(0, 1)).shape[1]

    def step(index):
        images = make_images(index, 2)
        for each, optimizer in zip((single, model), optimizers, strict=True):
            optimizer.zero_grad()
            mine = images[layout.data_rank : layout.data_rank + 1] if each is model else images
            loss_of(each(mine)).backward()
            optimizer.step()

    for index in range(3):
        step(index)
        for each, optimizer in zip((single, model), optimizers, strict=True):
            torch.manual_seed(8 + (layout.group.rank() if each is model else 0))
            part = nn.Sequential(nn.Conv2d(channels, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, channels, 1)).double()
            each.add_module(f"new{index}", part)
            each[0].bias = nn.Parameter(each[0].bias.detach() + index)
            optimizer.add_param_group({"params": [*part.parameters(), each[0].bias]})
            for parameter in part.parameters():
                parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        if index == 1:
            with pytest.raises(ValueError, match="outside of torchtp.no_sync"), torchtp.no_sync(model):
                model(make_images(0, 1))
            with pytest.raises(ValueError, match="in training mode"):
                model.eval()(make_images(0, 1))
            # The new part has other initial values on each rank until a forward in training takes it up.
            with (
                torch.no_grad(),
                pytest.raises(ValueError, match="evaluate different models: parameter 'new1.0.weight'"),
            ):
                model(make_images(0, 1))
            model.train()
    step(5)
    assert_same_parameters(model, single)
    assert_same_gradients(model, single)


def test_parts_may_be_replaced_and_added_while_training():
    run_ranks(_grows, 4)


def _made_by_its_type():
    layout = make_layout({"w": 2})
    torch.manual_seed(0)
    student = torchtp.parallelize(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 2, 3)), layout, output="full"
    )
    image = torch.rand(1, 3, 8, 8)
    teacher = type(student)(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 2, 3))
    teacher.load_state_dict(student.state_dict())
    assert type(teacher) is nn.Sequential
    torch.testing.assert_close(teacher(image), student(image))
    torch.testing.assert_close(student[:1](image), teacher[0](image))
    torchtp.parallelize(teacher.double(), layout, output="full")
    torch.testing.assert_close(teacher(image.double()).float(), student(image))
    copied = copy.deepcopy(student)
    copied(image).sum().backward()


def test_another_one_made_by_the_type_of_a_parallelized_module_is_a_plain_one():
    run_ranks(_made_by_its_type, 2)


class Specialised(nn.Module):
    """Its first call looks at the image and puts another forward in its own place."""

    def __init__(self):
        super().__init__()
        self.gain, self.num_looks = nn.Parameter(torch.ones(())), 0

    def forward(self, x):
        self.num_looks += 1
        self.forward = lambda x: 2 * x * self.gain
        return x * self.gain


def _delete(module, x):
    """Its only call takes it away."""
    del module.forward
    return type(module).forward(module, x)


def _puts_another_forward_in_its_place():
    layout = make_layout({"w": 2})
    single, model = Specialised(), torchtp.parallelize(Specialised(), layout)
    image = make_images(0, 1)
    for each in (single, model):
        each(image)
        torch.testing.assert_close(whole(each(image)), 2 * image)
        assert each.num_looks == 1
        del each.forward
        torch.testing.assert_close(whole(each(image)), image)
        del each.forward
        each.forward = functools.partial(_delete, each)
        torch.testing.assert_close(whole(each(image)), image)


def test_a_forward_may_put_another_in_its_place():
    run_ranks(_puts_another_forward_in_its_place, 2)


def _dropped():
    import torch._dynamo  # noqa: F401  (as optimizers do)

    model = torchtp.parallelize(make_network("convnext"), make_layout({"w": 2}))
    loss_of(model(make_images(0, 1))).backward()
    seen = [weakref.ref(model), weakref.ref(model._torchtp)]
    gc.disable()
    try:
        del model
        return [each() is None for each in seen]
    finally:
        gc.enable()


def test_what_the_program_drops_is_gone_at_once():
    assert run_ranks(_dropped, 2) == [[True, True]] * 2


class Fourier(nn.Module):
    """A part that has a buffer alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.randn(3, 3, 1, 1, dtype=torch.float64))

    def forward(self, x):
        return nn.functional.conv2d(x, self.waves).sin()


def _untrained_at_first():
    layout = make_layout({"dp": 2, "w": 2})
    torch.manual_seed(0)
    single = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)).double()
    model = torchtp.parallelize(copy.deepcopy(single), layout)

    def step(index):
        images = make_images(index, 2)
        for each, mine in ((single, images), (model, images[layout.data_rank : layout.data_rank + 1])):
            each.zero_grad()
            loss_of(each(mine)).backward()

    step(0)
    for make in (lambda: Fourier(), lambda: nn.Conv2d(3, 3, 1).double().requires_grad_(False)):
        for each in (single, model):
            torch.manual_seed(8 + (layout.group.rank() if each is model else 0))
            each.append(make())
        step(1)
    for each in (single, model):
        each.requires_grad_(True)
    step(2)
    assert_same_parameters(model, single)
    assert_same_gradients(model, single)


def test_parts_that_are_frozen_when_they_are_added_are_broadcast_and_may_be_thawed():
    run_ranks(_untrained_at_first, 4)


def _added_without_averaging():
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(2, 3, 3)).double(), make_layout({"w": 2}), reduce=False)
    loss_of(model(make_images(0, 1))).backward()
    model.append(nn.SyncBatchNorm(3).double())
    loss_of(model(make_images(0, 1))).backward()


def test_parts_may_be_added_where_others_average():
    run_ranks(_added_without_averaging, 2)


def _are_let_go():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 1)).double()
    torchtp.parallelize(model, make_layout({"w": 2}))
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        model(make_images(0, 1))
    assert [each() for each in old] == [None] * 4
    loss_of(model(make_images(0, 1))).backward()
    removed = weakref.ref(model[1].weight)
    model[1] = nn.Identity()
    loss_of(model(make_images(0, 1))).backward()
    gc.collect()
    assert removed() is None


def test_parameters_that_were_replaced_or_taken_away_are_let_go():
    run_ranks(_are_let_go, 2)


class Follows(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 2, 3))
        return x


@torch.no_grad()
def _added_without_gradients():
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(2, 3, 3)).double(), make_layout({"w": 2}))
    model(make_images(0, 1))
    model.append(Follows())
    model(make_images(0, 1))
    assert type(model[1].mean) is torch.Tensor


def test_parts_may_be_added_between_forwards_without_gradients():
    run_ranks(_added_without_gradients, 2)


class Prepared(nn.Module):
    """Makes its gain of another before each forward, as torch.nn.utils.prune does."""

    def __init__(self):
        super().__init__()
        self.gain_orig = nn.Parameter(torch.ones(2, 1, 1, dtype=torch.float64))
        self.register_forward_pre_hook(lambda module, args: setattr(module, "gain", 0.5 * module.gain_orig**2))

    def forward(self, x):
        return x * self.gain


def _read_by_hooks():
    model = torchtp.parallelize(Prepared(), make_layout({"w": 2}))
    loss_of(model(make_images(0, 1))).backward()
    model.gain_orig = nn.Parameter(torch.ones(2, 1, 1, dtype=torch.float64))
    loss_of(model(make_images(0, 1))).backward()
    single = Prepared()
    loss_of(single(make_images(0, 1))).backward()
    assert_same_gradients(model, single)


def test_a_replaced_parameter_may_be_read_by_a_hook_before_forward():
    run_ranks(_read_by_hooks, 2)
