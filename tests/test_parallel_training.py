"""What people do while they train: accumulate, clip, scale, checkpoint, compile, autocast; exact on cut images too."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import make_layout, make_network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import assert_same_gradients, assert_same_parameters, loss_of, make_images, make_optimizer, train_single

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
    assert_same_gradients(model, single)


def test_accumulation_with_and_without_no_sync():
    run_ranks(_accumulate, 4)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def encode(self, x):
        return F.silu(self.encoder(x))

    def decode(self, x):
        return self.decoder(x)

    def forward(self, x):
        return self.decode(self.encode(x))


def _by_its_methods(cut, kind):
    layout = make_layout({"dp": 2, "w": 2})
    torch.manual_seed(2)
    single = Autoencoder().double()
    model = torchtp.parallelize(copy.deepcopy(single).requires_grad_(kind != "frozen at first"), layout)
    model = (copy.deepcopy(model) if kind == "copied" else model).requires_grad_(True)
    for step in range(4):
        images = make_images(step, 2)
        mine = images[layout.data_rank : layout.data_rank + 1]
        mine = layout.shard(mine) if cut else mine
        for each, x in ((single, images), (model, mine)):
            each.encoder.requires_grad_(step != 2)
            each.zero_grad()
            loss_of(each.decode(each.encode(x))).backward()
        assert_same_gradients(model, single)


@pytest.mark.parametrize("kind", ["made", "copied", "frozen at first"])
@pytest.mark.parametrize("cut", [False, True])
def test_gradients_of_methods_that_go_past_forward_are_averaged_too(cut, kind):
    run_ranks(_by_its_methods, 4, cut, kind)


def _accumulate_by_its_methods():
    layout = make_layout({"dp": 2, "w": 2})
    torch.manual_seed(2)
    single = Autoencoder().double()
    single.encoder.requires_grad_(False)
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    for step in range(2):
        for each in (single, model):
            each.zero_grad()
            each.encoder.requires_grad_(step == 1)
        for part, sync in enumerate((torchtp.no_sync(model), contextlib.nullcontext())):
            images = make_images(2 * step + part, 2)
            loss_of(single.decode(single.encode(images))).backward()
            with sync:
                loss_of(model.decode(model.encode(images[layout.data_rank : layout.data_rank + 1]))).backward()
        assert_same_gradients(model, single)


def test_methods_that_accumulate_train_what_was_frozen():
    run_ranks(_accumulate_by_its_methods, 4)


def _cast_and_thaw_for_a_method():
    layout = make_layout({"dp": 2, "w": 2})
    torch.manual_seed(2)
    single = Autoencoder().double()
    single.decoder.requires_grad_(False)
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    for step in range(3):
        images = make_images(step, 2)
        for each, x in ((single, images), (model, images[layout.data_rank : layout.data_rank + 1])):
            each.zero_grad()
            if step == 0:
                loss_of(each(x)).backward()
            else:
                each.float().double()  # other accumulators
                each.encoder.requires_grad_(step == 2)
                each.decoder.requires_grad_(True)
                loss_of(each.decode(each.encode(x))).backward()
        assert_same_gradients(model, single)


def test_methods_train_what_was_cast_and_thawed_after_forward():
    run_ranks(_cast_and_thaw_for_a_method, 4)


class Head(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.own = encoder, nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.own(self.encoder(x))


def _train_heads(single, models, layout):
    for step in range(3):
        images = make_images(step, 2)
        for heads, x in ((single, images), (models, images[layout.data_rank : layout.data_rank + 1])):
            heads.zero_grad()
            for head in heads:
                loss_of(head(x)).backward()
        assert_same_gradients(models, single)


def _two_heads_of_one_encoder(remedy):
    layout = make_layout({"dp": 2, "w": 2})
    torch.manual_seed(2)
    encoder = nn.Conv2d(2, 4, 3, padding=1)
    single = nn.ModuleList([Head(encoder), Head(encoder)]).double()
    models = copy.deepcopy(single)
    for head in models:
        torchtp.parallelize(head, layout, reduce=not remedy)
    if remedy:
        reducer = torchtp.gradients.GradientReducer(models, layout.gradient_group)  # noqa: F841
        return _train_heads(single, models, layout)
    with pytest.raises(ValueError, match="'encoder.weight' is averaged by another module"):
        _train_heads(single, models, layout)
    models.pop(0)  # gone, and with it its reducer
    single.pop(0)
    _train_heads(single, models, layout)


@pytest.mark.parametrize("remedy", [False, True])
def test_two_modules_that_share_parameters_are_averaged_by_one_reducer(remedy):
    run_ranks(_two_heads_of_one_encoder, 4, remedy)


def _outer_after_inner(trained):
    layout = make_layout({"dp": 2, "w": 2})
    torch.manual_seed(2)
    single = nn.ModuleList([Head(nn.Conv2d(2, 4, 3, padding=1))]).double()
    models = copy.deepcopy(single)
    torchtp.parallelize(models[0].encoder, layout)
    if trained:
        loss_of(models[0].encoder(make_images(0, 1))).backward()
    torchtp.parallelize(models[0], layout)
    if trained == "of a copy":
        models = copy.deepcopy(models)
    _train_heads(single, models, layout)


@pytest.mark.parametrize("trained", [False, True, "of a copy"])
def test_a_module_around_a_parallelized_one_averages_for_both(trained):
    run_ranks(_outer_after_inner, 4, trained)


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
    assert_same_gradients(model, single)


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
    assert_same_gradients(model, single)


@pytest.mark.parametrize("what", ["root", "blocks", "step"])
def test_torch_compile_leaves_a_parallelized_module_eager_and_exact(what):
    run_ranks(_compiled, 2, what, timeout=120)


def _compiled_outside(what, backend):
    """A step or a loss that meets cut images outside of the module, images of several sizes."""
    layout = make_layout({"h": 2})
    models = [torchtp.parallelize(make_network("convnext"), layout) for _ in range(2)]
    torch._dynamo.reset()
    for compiled, model in enumerate(models):

        def loss_of(output, target):
            return F.mse_loss(output, target) + (output[..., 1:] - target[..., :-1]).abs().mean()

        def step(image, target, model=model, loss_of=loss_of):
            loss = loss_of(model(image), target)
            loss.backward()
            return loss

        if compiled and what == "loss":
            step.__defaults__ = model, torch.compile(loss_of, backend=backend)
        run = torch.compile(step, backend=backend) if compiled and what == "step" else step
        for size in (12, 18, 15):
            image = torch.randn(1, 2, size, size, generator=torch.Generator().manual_seed(size)).double()
            run(image, layout.shard(image[:, :1, : size // 2, : size // 2]))
    assert_same_gradients(*models)


@pytest.mark.parametrize("what, backend", [("step", "aot_eager"), ("loss", "aot_eager"), ("loss", "inductor")])
def test_torch_compile_leaves_cut_images_outside_of_the_module_to_run(what, backend):
    run_ranks(_compiled_outside, 2, what, backend, timeout=120)


def _compiled_elsewhere():
    """DTensors that are no images go into graphs as ever, once there are images too."""
    layout = make_layout({"w": 2})
    torchtp.parallelize(make_network("convnext"), layout)(make_images(0, 1))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    torch._dynamo.reset()

    def loss_of(a, b):
        return ((a @ b.t()).softmax(0) * 2 + a.sum() - b.mean()).square().sum()

    gradients = []
    for function in (loss_of, torch.compile(loss_of, backend="aot_eager", fullgraph=True)):
        full = torch.arange(24, dtype=torch.float64).view(4, 6) / 20
        tensors = [distribute_tensor(full.clone(), mesh, [Shard(dim)]).requires_grad_() for dim in (0, 1)]
        function(*tensors).backward()
        gradients.append([tensor.grad.full_tensor() for tensor in tensors])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_torch_compile_takes_other_dtensors_beside_a_parallelized_module():
    run_ranks(_compiled_elsewhere, 2, timeout=120)


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
