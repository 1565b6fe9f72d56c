"""A mistake is the same clear error on every rank, whichever rank made it; nothing hangs."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from models import make_layout, make_network
from torch import nn
from torch.autograd import forward_ad

import torchtp
from torchtp.testing import run_ranks

LIMIT = 40.0


def _call(axes, make_input, train):
    """What calling a model with `make_input(rank, layout)` raises."""
    layout = make_layout(axes)
    model = torchtp.parallelize(make_network("convnext", dtype=torch.float32), layout)
    with torch.set_grad_enabled(train), pytest.raises((ValueError, RuntimeError)) as caught:
        model(make_input(dist.get_rank(), layout))
    # The group is as good as before.
    model(torch.zeros(1, 2, 8, 8))
    return f"{type(caught.value).__name__}: {caught.value}"


def _other_shape(rank, layout):
    return torch.zeros(1, 2, 8, 8 + (rank == 1))


def _other_batch(rank, layout):
    return torch.zeros(1 + (rank == 0), 2, 8, 8)


def _other_dtype(rank, layout):
    return torch.zeros(1, 2, 8, 8, dtype=torch.float64 if rank == 1 else torch.float32)


def _other_number_of_dims(rank, layout):
    return torch.zeros((2, 8, 8) if rank == 1 else (1, 2, 8, 8))


def _no_tensor(rank, layout):
    return None if rank == 1 else torch.zeros(1, 2, 8, 8)


def _other_device(rank, layout):
    return torch.zeros(1, 2, 8, 8, device="meta" if rank == 1 else "cpu")


def _sparse(rank, layout):
    return torch.zeros(1, 2, 8, 8).to_sparse() if rank == 1 else torch.zeros(1, 2, 8, 8)


def _nested(rank, layout):
    image = torch.zeros(2, 8, 8)
    return torch.nested.nested_tensor([image, image[:, :5]]) if rank == 1 else torch.zeros(1, 2, 8, 8)


def _list_in_itself(rank, layout):
    images = [torch.zeros(1, 2, 8, 8)]
    if rank == 1:
        images.append(images)
    return images


def _every_rank_other_device(rank, layout):
    return torch.zeros(1, 2, 8, 8, device="meta")


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "axes, make_input, texts",
    [
        ({"w": 2}, _other_shape, ["(1, 2, 8, 8)", "rank 1 has an image of shape (1, 2, 8, 9)"]),
        (
            {"w": 2},
            _other_batch,
            ["rank 0 has an image of shape (2, 2, 8, 8)", "rank 1 has an image of shape (1, 2, 8, 8)"],
        ),
        ({"w": 2}, _other_dtype, ["torch.float32", "torch.float64"]),
        ({"w": 2}, _other_number_of_dims, ["(1, 2, 8, 8)", "(2, 8, 8)"]),
        ({"w": 2}, _no_tensor, ["rank 1 has no tensor"]),
        ({"w": 2}, _other_device, ["on meta can't be cut over a mesh of cpu devices", "(on rank 1)"]),
        ({"w": 2}, _sparse, ["a sparse_coo tensor can't be cut: pass a dense one (to_dense()) (on rank 1)"]),
        ({"w": 2}, _nested, ["a nested tensor can't be cut", "(on rank 1)"]),
        ({"w": 2}, _list_in_itself, ["an argument can't be described: RecursionError", "(on rank 1)"]),
        ({"w": 2}, _every_rank_other_device, ["on meta can't be cut"]),
        ({"h": 2, "w": 2}, _other_shape, ["rank 1 has an image of shape (1, 2, 8, 9)"]),
    ],
)
def test_ranks_that_disagree(axes, make_input, texts, train):
    errors = run_ranks(_call, torch.Size(axes.values()).numel(), axes, make_input, train, timeout=LIMIT)
    assert len(set(errors)) == 1
    for text in texts:
        assert text in errors[0]


def _one_data_rank():
    layout = make_layout({"dp": 2, "w": 2})
    model = torchtp.parallelize(make_network("convnext", dtype=torch.float32), layout)
    with pytest.raises(ValueError) as caught:
        model(_other_shape(dist.get_rank(), layout))
    model(torch.zeros(1 + layout.data_rank, 2, 8, 8))  # data ranks may have different numbers of images
    return str(caught.value)


def test_in_training_the_other_data_ranks_are_told():
    errors = run_ranks(_one_data_rank, 4, timeout=LIMIT)
    assert len(set(errors)) == 1 and "rank 1 has an image of shape (1, 2, 8, 9)" in errors[0]


def _wrong_parameter_dtype():
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(make_network("convnext", dtype=torch.float32), layout)
    with pytest.raises((ValueError, RuntimeError), match="(?i)dtype|type"):
        model(torch.zeros(1, 2, 8, 8, dtype=torch.float64))
    model(torch.zeros(1, 2, 8, 8))


def test_an_image_of_another_dtype_than_the_parameters():
    run_ranks(_wrong_parameter_dtype, 2, timeout=LIMIT)


def _different_modules(which):
    layout = make_layout({"w": 2})
    if which == "shape":
        module = nn.Conv2d(2, 3 + dist.get_rank(), 3)
    elif which == "number":
        module = nn.Conv2d(2, 3, 3, bias=dist.get_rank() == 0)
    elif which == "options":
        module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout(0.1 + dist.get_rank() / 2))
    else:
        module = nn.Conv2d(2, 3, 3, device="meta" if dist.get_rank() == 0 else "cpu")
    with pytest.raises(ValueError) as caught:
        torchtp.parallelize(module, layout)
    return str(caught.value)


@pytest.mark.parametrize(
    "which, text",
    [
        ("shape", "rank 1 has weight of shape (4, 2, 3, 3) and torch.float32"),
        ("number", "rank 1 has no tensor in its place"),
        ("device", "weight lives on meta, but the mesh is one of cpu devices"),
        ("options", "rank 0 has Dropout(p=0.1, inplace=False) as '1', rank 1 has Dropout(p=0.6, inplace=False) as '1'"),
    ],
)
def test_modules_that_differ(which, text):
    first, second = run_ranks(_different_modules, 2, which, timeout=LIMIT)
    assert first == second and text in first


def _wishes_that_differ(name, wishes):
    model = nn.Conv2d(2, 3, 3)
    layout = make_layout({"w": 2})
    with pytest.raises(ValueError) as caught:
        torchtp.parallelize(model, layout, **{name: wishes[dist.get_rank()]})
    return str(caught.value)


@pytest.mark.parametrize(
    "name, wishes, text",
    [
        (
            "output",
            ("local", "full"),
            'output="local", reduce=True, bucket_bytes=26214400, compression=none, rank 1 has',
        ),
        ("reduce", (True, False), 'output="dtensor", reduce=True, bucket_bytes=26214400, compression=none, rank 1 has'),
        ("compression", ("none", "bf16"), "compression=none, rank 1 has"),
        ("compression", ("none", "no"), "compression is 'none', 'fp16' or 'bf16', but it is 'no' (on rank 1)"),
        (
            "bucket_bytes",
            (-1, 0),
            "least sizes in bytes, but they are -1 and 0; 0 gives each parameter a bucket of its own (on rank 0)",
        ),
        ("output", ("full", "tile"), 'output is "dtensor", "local" or "full", but it is "tile" (on rank 1)'),
    ],
)
def test_wishes_that_differ(name, wishes, text):
    first, second = run_ranks(_wishes_that_differ, 2, name, wishes, timeout=LIMIT)
    assert first == second and text in first


def _misuse():
    layout = make_layout({"w": 2})
    with pytest.raises(ValueError, match='output is "dtensor", "local" or "full", but it is "tile"'):
        torchtp.parallelize(nn.Conv2d(1, 1, 1), layout, output="tile")
    with pytest.raises(ValueError, match="torchtp.parallelize was called on"), torchtp.no_sync(nn.Conv2d(1, 1, 1)):
        pass
    for arguments in ((layout, nn.Conv2d(1, 1, 1)), (lambda x: x, layout), (nn.Conv2d(1, 1, 1), layout.mesh)):
        with pytest.raises(TypeError, match="parallelize takes a torch"):
            torchtp.parallelize(*arguments)
    for spatial in ({"w"}, {"w": "-1"}, None):
        with pytest.raises(TypeError, match="spatial maps axes to the dims they cut"):
            torchtp.Layout(layout.mesh, spatial)
    with pytest.raises(TypeError, match="a Layout takes a DeviceMesh"):
        torchtp.Layout((2,), {"w": -1})
    with pytest.raises(TypeError, match="a Layout cuts tensors, not a list"):
        layout.shard([1, 2])


def test_misuse():
    run_ranks(_misuse, 2, timeout=LIMIT)


def _seen_through():
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU()), make_layout({"w": 2}), output="full")
    x = torch.rand(1, 1, 6, 6)
    with pytest.raises(RuntimeError, match="torch.jit.script can't see through a parallelized module"):
        torch.jit.script(model)
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match="forward-mode AD .* can't see through a parallelized module"):
            model(forward_ad.make_dual(x, x))
        assert model(x).shape == (1, 1, 4, 4)
    assert model(x).requires_grad
    y, whole = x.requires_grad_(), x * 2
    out = model(y)
    basis = torch.eye(16).view(16, 1, 1, 4, 4)
    for many in (
        lambda: torch.autograd.grad(out, y, basis, is_grads_batched=True),
        lambda: torch.autograd.functional.jacobian(model, x, vectorize=True),
        lambda: torch.func.vmap(lambda v: torch.autograd.grad(out, y, v, retain_graph=True)[0])(basis),
    ):
        with pytest.raises(RuntimeError, match="can't see through cut tensors"):
            many()
    assert torch.autograd.grad(out, y, basis[0])[0].any()  # the graph is still there
    (of_whole,) = torch.autograd.grad(whole, y, torch.eye(36).view(36, 1, 1, 6, 6), is_grads_batched=True)
    assert of_whole.sum() == 72
    edge = torch.autograd.graph.get_gradient_edge(model(y))
    assert torch.autograd.grad(edge, y, basis[0])[0].any()


def test_what_cannot_see_through_it_is_told():
    run_ranks(_seen_through, 2, timeout=LIMIT)


def _called_once(axes):
    layout = make_layout(axes)
    model = torchtp.parallelize(nn.Conv2d(2, 3, 3, padding=1), layout)
    images = torch.zeros(2, 2, 8, 8)
    model(images).sum().backward()
    return layout, model, images


def _call_in_another_way(axes, how):
    """What calling it raises, on this rank, if rank 0 alone does so in another way."""
    _, model, images = _called_once(axes)
    with contextlib.ExitStack() as stack, pytest.raises(ValueError) as caught:
        if dist.get_rank() == 0 and how == "evaluates":
            model.eval()
            stack.enter_context(torch.no_grad())
        elif dist.get_rank() == 0 and how == "does not average":
            stack.enter_context(torchtp.no_sync(model))
        elif dist.get_rank() == 0:
            stack.enter_context(torchtp.strict() if how == "is strict" else torch.autocast("cpu", torch.bfloat16))
        model(images)
    model.train()
    model(images).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "h": 2}], ids=str)
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("evaluates", "rank 0 calls it in evaluation, without gradients, rank 1 calls it in training"),
        ("does not average", "rank 0 calls it in training, under torchtp.no_sync, rank 1 calls it in training"),
        ("in fewer bits", "rank 0 calls it in training, under autocast to torch.bfloat16, rank 1 calls it in training"),
        ("is strict", "rank 0 calls it in training, under torchtp.strict, rank 1 calls it in training"),
    ],
)
def test_one_rank_calls_it_in_another_way(axes, how, text):
    told = run_ranks(_call_in_another_way, 4 if "dp" in axes else 2, axes, how, backend="torchtp", timeout=LIMIT)
    assert len(set(told)) == 1
    assert text in told[0]


def _average_other_gradients(axes, how):
    """What all ranks of one data rank do."""
    layout, model, images = _called_once(axes)
    with contextlib.ExitStack() as stack, pytest.raises(ValueError) as caught:
        if layout.data_rank == 1 and how == "no_sync":
            stack.enter_context(torchtp.no_sync(model))
        elif layout.data_rank == 1:
            model.bias.requires_grad_(False)
        model(images)
    return str(caught.value)


@pytest.mark.parametrize("axes", [{"dp": 2, "w": 1}, {"dp": 2, "h": 2}], ids=str)
@pytest.mark.parametrize(
    ("how", "text"),
    [("no_sync", "under torchtp.no_sync"), ("frozen", "with 1 parameters frozen ('bias' to 'bias')")],
)
def test_data_ranks_that_average_other_gradients(axes, how, text):
    size = 2 * axes.get("h", 1)
    told = run_ranks(_average_other_gradients, size, axes, how, backend="torchtp", timeout=LIMIT)
    assert len(set(told)) == 1
    assert f"rank 0 calls it to average all of them, rank {size // 2} calls it {text}; enter" in told[0]


def _after_the_end():
    make, image = (lambda: make_network("convnext", dtype=torch.float32)), torch.rand(1, 2, 8, 8)
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(make(), layout, output="full")
    expected = model(image)
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    messages = []
    for call in (model, lambda _: torchtp.parallelize(make(), layout), model):
        with pytest.raises(RuntimeError) as caught:
            call(image)
        messages.append(str(caught.value))
        if not dist.is_initialized():
            dist.init_process_group("torchtp", store=store, rank=rank, world_size=size)
    anew = torchtp.parallelize(make(), make_layout({"w": 2}), output="full")
    anew.load_state_dict(model.state_dict())
    assert torch.equal(anew(image), expected)
    return messages


def test_a_module_whose_group_was_destroyed_says_so():
    for messages in run_ranks(_after_the_end, 2, backend="torchtp", fresh=True):
        assert all("mesh was destroyed: after init_process_group make the mesh" in text for text in messages), messages


class _Steered(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x, *more, **named):
        return self.conv(x)


def _steered(argument, same):
    model = torchtp.parallelize(_Steered(), make_layout({"w": 2}))
    model(torch.zeros(1, 2, 8, 8), *same)
    mine = argument[dist.get_rank()]
    with pytest.raises(ValueError) as caught:
        model(torch.zeros(1, 2, 8, 8), **mine) if isinstance(mine, dict) else model(torch.zeros(1, 2, 8, 8), mine)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ((1, 2), "rank 0 has int '1', rank 1 has int '2'"),
        (("bilinear", "nearest"), "rank 0 has str 'bilinear', rank 1 has str 'nearest'"),
        ((True, False), "rank 0 has bool 'True', rank 1 has bool 'False'"),
        (({"a": 1}, {"b": 1}), "rank 0 has the keywords 'a', rank 1 has the keywords 'b'"),
        ((0.5, 0.75), "a float differs between rank 0 and rank 1, by up to 0.25"),
    ],
    ids=str,
)
def test_numbers_and_words_are_compared(argument, text):
    first, second = run_ranks(_steered, 2, argument, [3, 1e-300, "a", None, float("nan")], timeout=LIMIT)
    assert first == second and text in first


def test_no_sync_of_what_is_no_module():
    with (
        pytest.raises(ValueError, match="takes a module that torchtp.parallelize was called on"),
        torchtp.no_sync(None),
    ):
        pass
