"""What people do while they train: accumulate, clip, scale, checkpoint, compile, autocast; exact on cut images too."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import make_layout, make_network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import assert_same_parameters, loss_of, make_images, make_optimizer, train_single

import torchtp
from torchtp.testing import run_ranks


def _accumulate():
    layout = make_layout({"dp": 2, "w": 2})
    single = make_network("convnext")
    for step in range(3):
        loss_of(single(make_images(step, 2))).backward()
    model = torchtp.parallelize(make_network("convnext"), layout)
    mine = slice(layout.data_rank, layout.data_rank + 1)
    with torchtp.no_sync(model):
        loss_of(model(make_images(0, 2)[mine])).backward()
    local = model[0].weight.grad.clone()
    everybody = [torch.empty_like(local) for _ in range(4)]
    dist.all_gather(everybody, local)
    assert not torch.equal(everybody[0], everybody[1])
    loss_of(model(make_images(1, 2)[mine])).backward()
    loss_of(model(make_images(2, 2)[mine])).backward()  # on top of what is reduced already
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


def test_accumulation_with_and_without_no_sync():
    run_ranks(_accumulate, 4)


def _clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _clipped():
    layout = make_layout({"w": 2})
    single, _ = train_single("convnext", 3, 1, _clip)
    model = torchtp.parallelize(make_network("convnext"), layout)
    optimizer = make_optimizer(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(make_images(step, 1))).backward()
        _clip(model)
        optimizer.step()
    assert_same_parameters(model, single)


def test_clipping_sees_the_global_norm():
    run_ranks(_clipped, 2)


def _scaled():
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(make_network("convnext", dtype=torch.float32), layout)
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    single = make_network("convnext", dtype=torch.float32)
    loss_of(single(make_images(0, 1).float())).backward()
    make_optimizer(single).step()
    scales = []
    for image in (make_images(0, 1).float(), _with_an_inf_in_the_last_column(make_images(0, 1).float())):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(image))).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert scales == [1024.0, 512.0]


def _with_an_inf_in_the_last_column(image):
    image[..., -1] = torch.inf
    return image


def test_grad_scaler_skips_a_step_that_is_infinite_on_one_rank():
    run_ranks(_scaled, 2)


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
    loss_of(single(make_images(0, 3))).backward()
    model = Checkpointed(make_network("convnext", 0.4), reentrant)
    torchtp.parallelize(model, layout, reduce=not wrap)
    wrapped = DistributedDataParallel(model, process_group=layout.group) if wrap else model
    torch.manual_seed(7)
    loss_of(wrapped(make_images(0, 3))).backward()
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("wrap", [False, True])
def test_checkpointing(reentrant, wrap):
    run_ranks(_checkpointed, 2, reentrant, wrap)


def _compiled(what):
    layout = make_layout({"w": 2})
    single = make_network("convnext")
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    if what == "root":
        compiled = torch.compile(model, backend="eager")
    else:
        compiled = model
        for part in model.children() if what == "blocks" else []:
            part.compile(backend="eager")
    for each in (compiled, single):

        def step(each=each):
            loss_of(each(make_images(0, 1))).backward()

        if what == "step" and each is compiled:
            step = torch.compile(step, backend="eager")
        for _ in range(2):
            step()
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("what", ["root", "blocks", "step"])
def test_torch_compile_leaves_a_parallelized_module_eager_and_exact(what):
    run_ranks(_compiled, 2, what, timeout=120)


def _autocast():
    layout = make_layout({"w": 2})
    single = make_network("convnext", dtype=torch.float32)
    model = torchtp.parallelize(copy.deepcopy(single), layout, output="full")
    outputs = []
    for each in (model, single):
        with torch.autocast("cpu", torch.bfloat16):
            output = each(make_images(0, 1).float())
        assert output.dtype == torch.bfloat16
        loss_of(output.float()).backward()
        outputs.append(output.float())
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.02)
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert (mine.grad - theirs.grad).norm() <= 0.05 * theirs.grad.norm() + 1e-3


def test_autocast():
    run_ranks(_autocast, 2)


def _copied():
    layout = make_layout({"dp": 2, "w": 1})
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double(), layout, output="full")
    for trained in (False, True):
        mine = make_images(3 + layout.data_rank, 1)
        with torch.set_grad_enabled(trained):
            model(mine)
        average = copy.deepcopy(model).eval()
        average(mine)
        torch.testing.assert_close(average[1].running_mean, model[1].running_mean, rtol=0, atol=0)
        everybody = [torch.empty_like(average[1].running_mean) for _ in range(2)]
        dist.all_gather(everybody, average[1].running_mean)
        assert not torch.equal(*everybody)


def test_a_copy_keeps_the_statistics_of_its_data_rank():
    run_ranks(_copied, 2)
