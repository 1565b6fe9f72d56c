"""Ranks that cut one image must hold the same one, and all ranks the same model: what only differs in value is an error as well."""

import re

import pytest
import torch
import torch.distributed as dist
from models import make_layout, make_network
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import torchtp
from torchtp.parallel.samples import difference, digest_of, samples_of
from torchtp.testing import run_ranks

LIMIT = 60.0


def _image(seed):
    return torch.randn(2, 2, 12, 16, generator=torch.Generator().manual_seed(seed))


def _shuffled_by_rank(rank, layout):
    return _image(rank)


def _flipped_by_one(rank, layout):
    return _image(0).flip(-1) if rank == 1 else _image(0)


def _replicated(rank, layout):
    return layout.replicate(_image(rank))


def _only_nan_here(rank, layout):
    return _image(0).index_fill_(3, torch.tensor([3]), torch.nan if rank == 1 else 0.0)


def _call(axes, make_input, train):
    """What calling a model with `make_input(rank, layout)` raises; nothing where it does not."""
    layout = make_layout(axes)
    model = torchtp.parallelize(make_network("convnext", dtype=torch.float32), layout)
    told = ""
    try:
        with torch.set_grad_enabled(train):
            model(make_input(dist.get_rank(), layout))
    except ValueError as error:
        told = str(error)
    model(_image(0))  # the group is as good as before
    return told


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "h": 2}], ids=str)
@pytest.mark.parametrize("make_input", [_shuffled_by_rank, _flipped_by_one, _replicated, _only_nan_here])
def test_another_image(axes, make_input, train):
    told = run_ranks(_call, 4 if "dp" in axes else 2, axes, make_input, train, timeout=LIMIT)
    assert told[0] == told[1]
    assert "an image of shape (2, 2, 12, 16) and torch.float32 differs between rank 0 and rank 1" in told[0]
    assert "layout.data_rank" in told[0]
    if train:
        assert len(set(told)) == 1  # an error on some of them would leave the others waiting in the gradients


def _train_by_data_rank(axes):
    """Images by data rank, and times for each of them: no error, whatever their kinds."""
    layout = make_layout(axes)
    torch.manual_seed(0)
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU()), layout)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model.to(dtype)
        model(_image(layout.data_rank).to(dtype)).sum().backward()
    model.to(torch.float32)
    nearly = _image(layout.data_rank)
    nearly *= 1 + 1e-7 * layout.spatial_rank  # a preprocessing that rounds otherwise
    model(nearly)
    model(nearly.index_fill(3, torch.tensor([3]), torch.nan))
    model(nearly[:0])
    tile = layout.tile(nearly.shape)
    model(layout.from_tile(nearly[tile], nearly.shape))
    with torchtp.no_sync(model):
        model(nearly.to(memory_format=torch.channels_last)).sum().backward()
    model.eval()
    for _ in range(layout.data_rank):  # data ranks may evaluate different numbers of images
        model(nearly)
    return True


@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "h": 2}], ids=str)
def test_the_same_images_by_data_rank(axes):
    assert all(run_ranks(_train_by_data_rank, 4 if "dp" in axes else 2, axes, timeout=LIMIT))


class _Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, image, times, mask=None):
        return self.conv(image) * times.view(-1, 1, 1, 1)


def _call_with_other_times(rank_of_others):
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(_Conditional(), layout)
    times = torch.arange(2) + (dist.get_rank() == rank_of_others)
    with pytest.raises(ValueError) as caught:
        model(_image(0), times=times)
    model(_image(0), times=torch.arange(2))
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_another_tensor_beside_the_image(rank):
    told = run_ranks(_call_with_other_times, 2, rank, timeout=LIMIT)
    assert told[0] == told[1]
    assert "a tensor of shape (2,) and torch.int64 differs between rank 0 and rank 1, by up to 1" in told[0]


def _train_apart(axes, how):
    """The step at which training says that ranks train different models, and what it says."""
    layout = make_layout(axes)
    torch.manual_seed(0)
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 1, 1)), layout)
    last = dist.get_rank() == dist.get_world_size() - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + (last and how == "learning rate")))
    for step in range(1, 200):
        if last and how == "loads at the start" and step == 1:
            model.load_state_dict({name: 2 * one for name, one in model.state_dict().items()})
        if last and how == "changes late" and step == 70:
            with torch.no_grad():
                model[1].bias += 1
        try:
            loss = model(_image(layout.data_rank)).square().mean()
        except ValueError as error:
            return step, str(error)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 0, ""


@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "h": 2}], ids=str)
@pytest.mark.parametrize(
    "how, when, name",
    [
        ("learning rate", 2, "0.weight"),
        ("loads at the start", 1, "0.weight"),
        ("changes late", 128, "1.bias"),
        ("", 0, ""),
    ],
)
def test_models_that_part(axes, how, when, name):
    told = run_ranks(_train_apart, 4 if "dp" in axes else 2, axes, how, timeout=LIMIT)
    assert len(set(told)) == 1
    step, text = told[0]
    assert step == when
    assert (
        re.search(f"^the ranks train different models: parameter '{name}' differs between rank 0 and rank [13],", text)
        or not how
    )


def _evaluate_apart(axes, what, when):
    """The evaluations at which one rank hears that its image's ranks have different models, and what it hears."""
    layout = make_layout(axes)
    torch.manual_seed(0)
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), layout).eval()
    heard, said = [], ""
    for step in range(1, 12):
        if dist.get_rank() == 1 and step in (when, 9):
            tensor = dict([*model.named_parameters(), *model.named_buffers()])[what]
            tensor.data += 0.5 if step == when else -0.5
        try:
            with torch.no_grad():
                model(_image(layout.data_rank))
        except ValueError as error:
            heard.append(step)
            said = str(error)
    return heard, said


@pytest.mark.parametrize(
    ("what", "when", "heard"), [("0.weight", 1, [1, 2, 3, 4, 5, 6, 7, 8]), ("1.running_var", 5, [8])]
)
@pytest.mark.parametrize("axes", [{"w": 2}, {"dp": 2, "h": 2}], ids=str)
def test_models_that_are_apart_in_evaluation(axes, what, when, heard):
    told = run_ranks(_evaluate_apart, 4 if "dp" in axes else 2, axes, what, when, timeout=LIMIT)
    for steps, said in told[:2]:
        assert steps == heard
        assert re.search(f"^the ranks evaluate different models: .* '{what}' differs between rank 0 and rank 1,", said)
    assert all(steps == [] for steps, _ in told[2:])


def _one_part_evaluates(train):
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Dropout()), make_layout({"w": 2})).train(train)
    model[1].train(train != (dist.get_rank() == 1))
    with pytest.raises(ValueError, match=r"rank 1 calls it in \w+, with 1 parts in \w+ \('1' to '1'\)"):
        model(_image(0))
    model.train()
    model(_image(0)).sum().backward()


@pytest.mark.parametrize("train", [True, False])
def test_a_part_in_another_mode(train):
    run_ranks(_one_part_evaluates, 2, train, timeout=LIMIT)


def _cut_otherwise():
    dims = {"s": -1 if dist.get_rank() == 1 else -2}
    layout = torchtp.Layout(init_device_mesh("cpu", (2,), mesh_dim_names=("s",)), spatial=dims)
    with pytest.raises(
        ValueError,
        match=r"rank 0 has Layout\(s \(2\) cuts dim -2\) with .*, rank 1 has Layout\(s \(2\) cuts dim -1\) with ",
    ):
        torchtp.parallelize(nn.Conv2d(2, 2, 3), layout)


def test_layouts_that_cut_other_dims():
    run_ranks(_cut_otherwise, 2, timeout=LIMIT)


def _copies_while_the_other_calls():
    model = torchtp.parallelize(nn.Conv2d(2, 2, 3), layout := make_layout({"w": 2}))
    model(_image(0)).sum().backward()
    told = "the ranks do different things at once: rank 0 calls the module, rank 1 makes, copies or renews a parallelized module"
    with pytest.raises(ValueError, match=told):
        torchtp.parallelize(nn.Conv2d(2, 2, 3), layout) if dist.get_rank() == 1 else model(_image(0))
    model(_image(0))


def test_one_rank_makes_a_model_while_another_calls_one():
    run_ranks(_copies_while_the_other_calls, 2, timeout=LIMIT)


class _Calibrated(nn.Module):
    """Keeps what belongs to the images of a data rank as a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(2, 1, 1), requires_grad=False)

    def forward(self, image):
        return self.gain * self.conv(image)


def _train_calibrated():
    layout = make_layout({"dp": 2, "h": 2})
    model = torchtp.parallelize(_Calibrated(), layout)
    for step in range(1, 9):
        model.gain.data = torch.full((2, 1, 1), float(step + layout.data_rank))
        model(_image(layout.data_rank)).sum().backward()
    return model.gain.flatten().tolist()


def test_what_is_not_trained_may_be_a_data_rank_s_own():
    assert run_ranks(_train_calibrated, 4, timeout=LIMIT) == [[8.0, 8.0], [8.0, 8.0], [9.0, 9.0], [9.0, 9.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_rounding_is_no_difference(dtype):
    one = torch.randn(50, dtype=torch.float64).to(dtype)
    rounded = one * (1 + torch.finfo(dtype).eps)
    assert difference(one, rounded) == 0
    assert difference(one, 1.1 * one) > 0
    assert difference(one, -one) > 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_compared_as_well(value):
    one = torch.tensor([1.0, value, 2.0])
    assert difference(one, one.clone()) == 0
    assert difference(one, torch.tensor([1.0, 0.0, 2.0])) == torch.inf
    assert difference(torch.tensor([1.0, 0.0, 2.0]), one) == torch.inf


class _Wrapper(torch.Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} is called")


class _Named(torch.Tensor):
    """As an image of torchvision's transforms."""


def test_samples_of_other_kinds_of_tensors():
    image = torch.randn(2, 3, 50, 40)
    assert samples_of([_Wrapper((3, 4))]) == [None]
    assert torch.equal(samples_of([image.as_subclass(_Named)])[0], samples_of([image])[0])
    with FakeTensorMode() as mode:
        assert samples_of([mode.from_tensor(image)]) == [None]
        assert digest_of(samples_of([image])) != 0
    with FlopCounterMode(display=False), torch.inference_mode(), torch.device("meta"):
        assert torch.equal(samples_of([image])[0], samples_of([image.to("cpu")])[0])


def test_samples():
    image = torch.randn(3, 3, 500, 741)
    for same in (image, image.to(memory_format=torch.channels_last), image[:, :, ::2], image[..., 1:], image.mT):
        (sample,) = samples_of([same])
        assert sample.dim() == 1 and 100 < sample.numel() <= 4096
        assert digest_of([sample]) == digest_of(samples_of([same.clone()]))
        assert digest_of([sample]) != digest_of(samples_of([same.flip(-1)])) != digest_of(samples_of([same.flip(-2)]))
        assert all(digest_of([sample]) != digest_of(samples_of([same.roll(1, dim)])) for dim in range(4))
    whole = torch.arange(100)
    assert torch.equal(samples_of([whole])[0], whole)
    assert torch.equal(samples_of([torch.tensor(3)])[0], torch.tensor([3]))
    assert samples_of([torch.zeros(0, 3)])[0].numel() == 0
    assert samples_of([torch.eye(3).to_sparse(), torch.zeros(3, device="meta"), None]) == [None] * 3
    assert digest_of([]) == 0
    assert torch.equal(samples_of([torch.tensor([1 + 2j]).conj()])[0], torch.tensor([1 - 2j]))
