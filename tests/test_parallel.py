"""parallelize: unedited networks train to the parameters of the single device, and stay ordinary modules."""

import abc
import copy
import types
import warnings
from typing import Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
from models import make_layout, make_network
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_gradients, assert_same_parameters, loss_of, make_images, make_optimizer, train_single

import torchtp
from torchtp.testing import run_ranks

T = TypeVar("T")


def _train(axes, network, wrap, output):
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    layout = make_layout(axes)
    single, expected = train_single(network, 5, layout.num_data)
    model = make_network(network)
    if layout.group.rank() > 0:  # the first rank's parameters are everybody's
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    torchtp.parallelize(model, layout, output=output, reduce=wrap is None)
    if wrap == "ddp":
        model = DistributedDataParallel(model, process_group=layout.group)
    elif wrap == "fsdp":
        flat = layout.mesh if layout.mesh.ndim == 1 else layout.mesh._flatten()
        fully_shard(model[1] if isinstance(model, nn.Sequential) else model.down, mesh=flat)
        fully_shard(model, mesh=flat)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        mine = make_images(step, layout.num_data)[layout.data_rank : layout.data_rank + 1]
        loss = loss_of(model(mine))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=layout.group)
    mean /= layout.group.size()
    torch.testing.assert_close(mean, expected, rtol=1e-9, atol=1e-10)
    assert_same_parameters(model, single)


MESHES = [{"w": 1}, {"w": 2}, {"w": 3}, {"h": 2, "w": 2}, {"dp": 2, "w": 2}]


def _is_possible(axes, network):
    return not (network == "batch_norm" and "dp" in axes)  # each data rank's statistics are its own, as in DDP


@pytest.mark.parametrize("network", ["convnext", "batch_norm", "unet"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_training_equals_the_single_device(axes, network):
    if _is_possible(axes, network):
        run_ranks(_train, torch.Size(axes.values()).numel(), axes, network, None, "full")


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("network", ["convnext", "unet"])
@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "w": 2}], ids=str)
def test_stock_wrappers_over_the_group_give_the_same_parameters(axes, network, wrap):
    run_ranks(_train, torch.Size(axes.values()).numel(), axes, network, wrap, "dtensor")


def _outputs(output):
    layout = make_layout({"h": 2, "w": 2})
    single = make_network("convnext")
    model = torchtp.parallelize(copy.deepcopy(single), layout, output=output)
    images = make_images(0, 2)
    full = model(images)
    cut = model(layout.shard(images))
    tile = model(layout.from_tile(images[layout.tile(images.shape)], images.shape))
    expected = single(images)
    for value in (full, cut, tile):
        if output == "local":
            assert type(value) is torch.Tensor
            value, whole = value, expected[layout.tile(expected.shape)]
        elif output == "full":
            assert type(value) is torch.Tensor
            whole = expected
        else:
            assert isinstance(value, DTensor) and value.placements == layout.placements(4)
            value, whole = value.full_tensor(), expected
        torch.testing.assert_close(value, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("output", ["dtensor", "local", "full"])
def test_full_images_tiles_and_dtensors_go_in(output):
    run_ranks(_outputs, 4, output)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 2).view(2, 1, 1))

    def forward(self, x):
        return torch.sigmoid(x * self.scale)


class AbstractFirst(abc.ABC, Scaled):
    pass


class GenericFirst(Generic[T], Scaled):
    pass


class Registered(Scaled):
    """Of a family whose classes have to tell a name."""

    known: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, name, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.known.append(name)


class OneOfThem(Registered, name="one"):
    pass


class Locked(Scaled):
    def __setattr__(self, name, value):
        if "scale" in self._parameters:
            raise AttributeError(f"locked: {name}")
        super().__setattr__(name, value)


class HandsOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Scaled()

    def __setattr__(self, name, value):
        if "inner" in self.__dict__.get("_modules", {}):
            return setattr(self.inner, name, value)
        return super().__setattr__(name, value)

    def forward(self, x):
        return self.inner(x)


def _other_bases(kind):
    layout = make_layout({"w": 2})
    models = []
    for make in (Scaled, (lambda: torch.jit.script(Scaled())) if kind == "script" else kind):
        torch.manual_seed(4)
        models.append(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), make(), nn.Conv2d(2, 1, 3, padding=1)).double())
    single, model = models
    torchtp.parallelize(model, layout)
    for each in (single, model):
        loss_of(each(make_images(0, 2))).backward()
    for (name, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10, msg=name)
    assert Registered.known == ["one"]
    if kind != "script":
        torch.testing.assert_close(*(loss_of(each(make_images(1, 2))) for each in (copy.deepcopy(model), model)))


@pytest.mark.parametrize("kind", [AbstractFirst, GenericFirst, OneOfThem, Locked, HandsOn, "script"])
def test_modules_of_other_classes_than_module_alone(kind):
    run_ranks(_other_bases, 2, kind)


def _another_forward(when):
    """A forward put on the module itself, before or after `parallelize`, that calls the class's."""
    layout = make_layout({"dp": 2, "w": 2})
    single, model = make_network("convnext"), make_network("convnext")
    seen = []

    def replace(module):
        old = module.forward

        def forward(self, image, factor):
            seen.append(type(image))
            return old(image) * factor

        module.forward = types.MethodType(forward, module)

    replace(single)
    if when == "before":
        replace(model)
    torchtp.parallelize(model, layout, output="full")
    if when == "after":
        replace(model)
    images = make_images(0, 2)
    loss_of(single(images, 2.0)).backward()
    loss_of(model(images[layout.data_rank : layout.data_rank + 1], 2.0)).backward()
    assert seen == [torch.Tensor, DTensor]
    assert_same_gradients(model, single)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_of_the_module_alone_is_parallelized(when):
    run_ranks(_another_forward, 4, when)


def _without_shapes():
    model = nn.Sequential(nn.LazyConv2d(2, 3), nn.BatchNorm2d(2))
    with pytest.raises(ValueError, match="0.weight has no shape yet: call the module once"):
        torchtp.parallelize(model, make_layout({"w": 2}))


def test_lazy_parameters_are_refused():
    run_ranks(_without_shapes, 2)


def _transformed():
    model = torchtp.parallelize(make_network("convnext"), make_layout({"w": 2}))
    images = make_images(0, 1)
    with pytest.raises(RuntimeError, match="torch.func .* use backward"):
        torch.func.vmap(model)(images[None])
    with pytest.raises(RuntimeError, match="torch.jit.trace .* without parallelize"):
        torch.jit.trace(model, (images,))
    with pytest.raises(RuntimeError, match="torch.export .* without parallelize"):
        torch.export.export(model, (images,), strict=False)


def _traced():
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(2, 2, 3)), make_layout({"w": 2}))
    with pytest.raises(RuntimeError, match="torch.fx.symbolic_trace can't see through"):
        torch.fx.symbolic_trace(model)
    made = {"output": model(torch.rand(1, 2, 8, 8))}
    exec("made = output.full_tensor()", made)


def test_tracing_is_refused_and_code_without_a_module_goes_on():
    run_ranks(_traced, 2)


def test_transforms_are_refused():
    run_ranks(_transformed, 2)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, pair, *, options, scale, time=None):
        left, right = pair["left"], pair["right"]
        assert isinstance(left, DTensor) == isinstance(right, DTensor) == isinstance(self, torchtp.parallel.root.Root)
        assert not isinstance(time, DTensor)
        out = self.conv(left) - self.conv(right) * scale + time.view(-1, 1, 1, 1)
        return {"maps": [out, out * 2], "options": options}


def _nested():
    layout = make_layout({"w": 2})
    torch.manual_seed(0)
    single = Nested().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    arguments = {"options": ("a", 3), "scale": 0.5, "time": torch.arange(2.0, dtype=torch.float64)}
    pair = {"left": make_images(0, 2), "right": make_images(1, 2)}
    expected, actual = single(pair, **arguments), model(pair, **arguments)
    torch.testing.assert_close(actual["maps"], expected["maps"], rtol=1e-10, atol=1e-10)
    assert actual["options"] == ("a", 3)


def test_nested_arguments_and_outputs():
    run_ranks(_nested, 2)


def _ordinary():
    layout = make_layout({"w": 2})
    single = make_network("convnext")
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    assert type(model).__name__ == "Sequential" and isinstance(model, nn.Sequential)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in single.named_parameters()]
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert model[1].gamma is dict(model.named_parameters())["1.gamma"]
    images = make_images(0, 2)
    expected = single(images).detach()
    # state_dict of the single device loads, and the other way round
    fresh = torchtp.parallelize(make_network("convnext", 0.0), layout, output="full")
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    fresh.load_state_dict(single.state_dict())
    make_network("convnext").load_state_dict(model.state_dict())
    # a copy is another model on the same layout
    clone = copy.deepcopy(model)
    for each in (model, fresh, clone):
        torch.testing.assert_close(each(images).detach(), expected, rtol=1e-10, atol=1e-10)
    loss_of(clone(images)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    gradients = [parameter.grad.clone() for parameter in clone.parameters()]
    loss_of(single(images)).backward()
    for mine, theirs in zip(gradients, single.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-9, atol=1e-10)
    with pytest.raises(TypeError, match="save its state_dict"):
        torch.save(model, "/dev/null")
    with pytest.raises(ValueError, match="parallelized already"):
        torchtp.parallelize(model, layout)


def test_a_parallelized_module_stays_an_ordinary_one():
    run_ranks(_ordinary, 2)


def _without_gradients():
    layout = make_layout({"w": 2})
    single = make_network("batch_norm")
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    single.eval()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(make_images(0, 1)), single(make_images(0, 1)), rtol=1e-10, atol=1e-10)
    if dist.get_rank() == 0:  # what only one rank does with the parameters alone needs nobody
        assert model.state_dict().keys() == single.state_dict().keys()


class Patches(nn.Module):
    """Views of its image, before anything else."""

    def forward(self, x):
        rows = x.detach().view(2, 3, 2, 2, *x.shape[3:]).transpose(1, 2)
        rows[:, 0] += 1
        return rows.flatten(0, 1)


def _in_inference_mode():
    layout = make_layout({"w": 2})
    image = torch.randn(2, 3, 4, 7)
    outside = layout.shard(image)
    with torch.inference_mode():
        output = torchtp.parallelize(Patches(), layout)(outside)
        torch.testing.assert_close(output.full_tensor(), Patches()(image))


def test_an_image_cut_outside_of_inference_mode_is_viewed_inside():
    run_ranks(_in_inference_mode, 2)


def test_evaluation():
    run_ranks(_without_gradients, 2)


def _frozen_and_unused():
    layout = make_layout({"w": 2})
    single = make_network("convnext")
    single.unused = nn.Linear(2, 2).double()
    del single._modules["unused"]
    single[1].register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    single[2].requires_grad_(False)
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    for each in (single, model):
        loss_of(each(make_images(0, 1))).backward()
    for (name, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


def test_frozen_and_unused_parameters():
    run_ranks(_frozen_and_unused, 2)


def _input_gradient():
    layout = make_layout({"w": 3})
    single = make_network("convnext")
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    mine, theirs = make_images(0, 1).requires_grad_(), make_images(0, 1).requires_grad_()
    loss_of(model(mine)).backward()
    loss_of(single(theirs)).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_the_gradient_of_a_full_image_is_full():
    run_ranks(_input_gradient, 3)


def _one_process_alone(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        _train({"h": 1, "w": 1}, "unet", None, "full")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "torchtp"])
def test_one_process_without_a_launcher(backend):
    run_ranks(_one_process_alone, 1, backend, backend=None)


@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "w": 2}], ids=str)
def test_training_on_the_backend_torchtp(axes):
    run_ranks(_train, torch.Size(axes.values()).numel(), axes, "convnext", None, "full", backend="torchtp")
