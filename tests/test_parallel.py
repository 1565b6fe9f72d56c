"""parallelize: unedited networks train to the parameters of the single device, and stay ordinary modules."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from models import make_layout, make_network
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchtp
from torchtp.testing import run_ranks

SHAPE = (2, 13, 17)  # channels, height, width of an image: uneven whatever it is cut into; odd for the U-Net


def _images(step, num, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(num, *SHAPE, generator=generator, dtype=dtype)


def _loss(output):
    whole = output.full_tensor() if isinstance(output, DTensor) else output
    return (whole - 0.3).square().mean()


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _train_single(network, steps, num, before_step=lambda model: None):
    model = make_network(network)
    optimizer = _optimizer(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = _loss(model(_images(step, num)))
        loss.backward()
        before_step(model)
        optimizer.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)


def _assert_same_parameters(model, single):
    mine, theirs = model.state_dict(), single.state_dict()
    names = [name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "") for name in mine]
    assert names == list(theirs)
    for value, name in zip(mine.values(), names, strict=True):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text)


def _train(axes, network, wrap, output):
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    layout = make_layout(axes)
    single, expected = _train_single(network, 5, layout.num_data)
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
    optimizer = _optimizer(model)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        mine = _images(step, layout.num_data)[layout.data_rank : layout.data_rank + 1]
        loss = _loss(model(mine))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=layout.group)
    mean /= layout.group.size()
    torch.testing.assert_close(mean, expected, rtol=1e-9, atol=1e-10)
    _assert_same_parameters(model, single)


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
    images = _images(0, 2)
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


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, pair, *, options, scale, time=None):
        left, right = pair["left"], pair["right"]
        assert isinstance(left, DTensor) == isinstance(right, DTensor) == isinstance(self, torchtp.parallel._Root)
        assert not isinstance(time, DTensor)
        out = self.conv(left) - self.conv(right) * scale + time.view(-1, 1, 1, 1)
        return {"maps": [out, out * 2], "options": options}


def _nested():
    layout = make_layout({"w": 2})
    torch.manual_seed(0)
    single = Nested().double()
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    arguments = {"options": ("a", 3), "scale": 0.5, "time": torch.arange(2.0, dtype=torch.float64)}
    pair = {"left": _images(0, 2), "right": _images(1, 2)}
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
    images = _images(0, 2)
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
    _loss(clone(images)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    gradients = [parameter.grad.clone() for parameter in clone.parameters()]
    _loss(single(images)).backward()
    for mine, theirs in zip(gradients, single.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-9, atol=1e-10)
    with pytest.raises(TypeError, match="save its state_dict"):
        torch.save(model, "/dev/null")
    with pytest.raises(ValueError, match="parallelized already"):
        torchtp.parallelize(model, layout)


def test_a_parallelized_module_stays_an_ordinary_one():
    run_ranks(_ordinary, 2)


def _accumulate():
    layout = make_layout({"dp": 2, "w": 2})
    single = make_network("convnext")
    for step in range(3):
        _loss(single(_images(step, 2))).backward()
    model = torchtp.parallelize(make_network("convnext"), layout)
    mine = slice(layout.data_rank, layout.data_rank + 1)
    with torchtp.no_sync(model):
        _loss(model(_images(0, 2)[mine])).backward()
    local = model[0].weight.grad.clone()
    everybody = [torch.empty_like(local) for _ in range(4)]
    dist.all_gather(everybody, local)
    assert not torch.equal(everybody[0], everybody[1])
    _loss(model(_images(1, 2)[mine])).backward()
    _loss(model(_images(2, 2)[mine])).backward()  # on top of what is reduced already
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


def test_accumulation_with_and_without_no_sync():
    run_ranks(_accumulate, 4)


def _clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _clipped():
    layout = make_layout({"w": 2})
    single, _ = _train_single("convnext", 3, 1, _clip)
    model = torchtp.parallelize(make_network("convnext"), layout)
    optimizer = _optimizer(model)
    for step in range(3):
        optimizer.zero_grad()
        _loss(model(_images(step, 1))).backward()
        _clip(model)
        optimizer.step()
    _assert_same_parameters(model, single)


def test_clipping_sees_the_global_norm():
    run_ranks(_clipped, 2)


def _scaled(infinite_on):
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(make_network("convnext", dtype=torch.float32), layout)
    optimizer = _optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler.scale(_loss(model(_images(0, 1).float()))).backward()
    if dist.get_rank() == infinite_on:
        for parameter in model.parameters():
            assert parameter.grad.isfinite().all()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    single = make_network("convnext", dtype=torch.float32)
    _loss(single(_images(0, 1).float())).backward()
    _optimizer(single).step()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_grad_scaler():
    run_ranks(_scaled, 2, 1)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x):
        x = self.inner[0](x)
        for block in self.inner[1:3]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.inner[3](x)


def _checkpointed(reentrant, wrap):
    layout = make_layout({"w": 2})
    single = make_network("convnext", 0.4)
    torch.manual_seed(7)
    _loss(single(_images(0, 3))).backward()
    model = Checkpointed(make_network("convnext", 0.4), reentrant)
    torchtp.parallelize(model, layout, reduce=not wrap)
    wrapped = DistributedDataParallel(model, process_group=layout.group) if wrap else model
    torch.manual_seed(7)
    _loss(wrapped(_images(0, 3))).backward()
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("wrap", [False, True])
def test_checkpointing(reentrant, wrap):
    run_ranks(_checkpointed, 2, reentrant, wrap)


def _without_gradients():
    layout = make_layout({"w": 2})
    single = make_network("batch_norm")
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    single.eval()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(_images(0, 1)), single(_images(0, 1)), rtol=1e-10, atol=1e-10)
    if dist.get_rank() == 0:  # what only one rank does with the parameters alone needs nobody
        assert model.state_dict().keys() == single.state_dict().keys()


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
        _loss(each(_images(0, 1))).backward()
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
    mine, theirs = _images(0, 1).requires_grad_(), _images(0, 1).requires_grad_()
    _loss(model(mine)).backward()
    _loss(single(theirs)).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_the_gradient_of_a_full_image_is_full():
    run_ranks(_input_gradient, 3)


def _compiled(what):
    layout = make_layout({"w": 2})
    single = make_network("convnext")
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    if what == "root":
        compiled = torch.compile(model, backend="eager")
    else:
        compiled = model
        for part in model.children():
            part.compile(backend="eager")
    for each in (compiled, single):
        for _ in range(2):
            _loss(each(_images(0, 1))).backward()
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("what", ["root", "blocks"])
def test_torch_compile_leaves_a_parallelized_module_eager_and_exact(what):
    run_ranks(_compiled, 2, what, timeout=120)


def _autocast():
    layout = make_layout({"w": 2})
    single = make_network("convnext", dtype=torch.float32)
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    outputs = []
    for each in (model, single):
        with torch.autocast("cpu", torch.bfloat16):
            output = each(_images(0, 1).float())
        assert output.dtype == torch.bfloat16
        _loss(output.float()).backward()
        outputs.append(output.float())
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.02)
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert (mine.grad - theirs.grad).norm() <= 0.05 * theirs.grad.norm() + 1e-3


def test_autocast():
    run_ranks(_autocast, 2)


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
