"""What a forward writes into parameters and buffers from its images is the same on all data ranks by the next forward."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from models import make_layout
from torch import nn

import torchtp
from torchtp.testing import run_ranks


class ActNorm(nn.Module):
    """Its parameters are made of the first images it sees."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.shift, self.scale = nn.Parameter(torch.zeros(3, 1, 1)), nn.Parameter(torch.ones(3, 1, 1))
        self.register_buffer("is_made", torch.tensor(False))

    def forward(self, x):
        if not self.is_made:
            mean, deviation = x.mean((0, 2, 3))[:, None, None], x.std((0, 2, 3))[:, None, None]
            if self.way == "data":
                self.shift.data.copy_(-mean)
                self.scale.data[:] = 1 / deviation
            elif self.way == "set":
                self.shift.data, self.scale.data = -mean.detach(), 1 / deviation.detach()
            elif self.way == "set to the whole":
                self.shift.data, self.scale.data = -mean.detach().full_tensor(), 1 / deviation.detach().full_tensor()
            else:
                with torch.no_grad():
                    self.shift.sub_(mean)
                    self.scale.div_(deviation)
            self.is_made.fill_(True)
        return self.scale * (x + self.shift)


class Codebook(nn.Module):
    """A buffer that follows the images, and that the next forward reads."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        if way != "late":
            self.register_buffer("means", torch.zeros(3, 1, 1))

    def forward(self, x):
        seen = x.detach().mean((0, 2, 3))[:, None, None]
        if not hasattr(self, "means"):
            self.register_buffer("means", 0 * seen)
        if self.way in ("in place", "late"):
            self.means.mul_(0.9).add_(seen, alpha=0.1)
        elif self.way == "out":
            torch.lerp(self.means, seen, 0.1, out=self.means)
        else:
            self.means = 0.9 * self.means + 0.1 * seen
        return x - self.means


def _make(kind, way):
    torch.manual_seed(0)
    middle = ActNorm(way) if kind == "initial values" else Codebook(way)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), middle, nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1))
    return model.double()


def _images(step, data_rank):
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return torch.randn(2, 2, 9, 12, generator=generator, dtype=torch.float64) * (1 + data_rank) + data_rank


def _train(kind, way, first):
    layout = make_layout({"dp": 2, "w": 2})
    model = torchtp.parallelize(_make(kind, way), layout)
    alone = _make(kind, "set" if way == "set to the whole" else way)  # there all is whole
    with torch.no_grad() if first == "without gradients" else contextlib.nullcontext():
        model(_images(0, layout.data_rank))
        alone(_images(0, 0))
    if first == "a copy's":
        model = copy.deepcopy(model)
    loss = model(_images(1, layout.data_rank)).square().mean()
    if first == "one of two":
        loss = loss + model(_images(2, layout.data_rank)).square().mean()
    loss.backward()
    written = {name: value for name, value in model[1].state_dict().items() if value.is_floating_point()}
    if kind == "initial values":
        for name, value in written.items():
            torch.testing.assert_close(value, alone[1].state_dict()[name])
    else:
        model(_images(3, layout.data_rank))  # has overwritten what the last one before it wrote
        model(_images(4, 0))
        model(_images(5, 0))
    for value in [model[1].state_dict()[name] for name in written]:
        _assert_alike(value)
    for parameter in model.parameters():
        _assert_alike(parameter.grad)
    statistics = [torch.empty(3, dtype=torch.float64) for _ in range(4)]
    dist.all_gather(statistics, model[2].running_mean)
    assert not torch.equal(statistics[0], statistics[2])  # of what each data rank has seen


def _assert_alike(tensor):
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor.detach().contiguous())
    for other in everybody:
        torch.testing.assert_close(other, everybody[0])


@pytest.mark.parametrize("first", ["before", "without gradients", "one of two", "a copy's"])
@pytest.mark.parametrize(
    "kind, way",
    [
        ("initial values", "data"),
        ("initial values", "set"),
        ("initial values", "set to the whole"),
        ("initial values", "in place"),
        ("codebook", "in place"),
        ("codebook", "replaced"),
        ("codebook", "out"),
        ("codebook", "late"),
    ],
)
def test_what_a_forward_writes_is_alike_on_all_data_ranks(kind, way, first):
    run_ranks(_train, 4, kind, way, first)


class Table(nn.Module):
    """Keeps places for the size of its last images."""

    def __init__(self, way):
        super().__init__()
        self.way, self.gain = way, nn.Parameter(torch.ones(()))
        self.register_buffer("places", None, persistent=False)

    def forward(self, x):
        height, width = x.shape[-2:]
        if self.places is None or self.places.shape[-2:] != x.shape[-2:]:
            if self.way == "like the image":
                self.places = torch.ones_like(x[:1, :1])
            elif self.way == "made":
                self.places = torch.ones(1, height, width, dtype=x.dtype)
            else:
                self.places = torch.arange(width, dtype=x.dtype).expand(1, height, width).contiguous()
        return self.gain * (x + self.places)


def _of_other_sizes(way):
    layout = make_layout({"dp": 2, "w": 2})
    torch.manual_seed(0)
    single = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), Table(way)).double()
    model = torchtp.parallelize(copy.deepcopy(single), layout)
    images = [torch.randn(1, 2, 7 + data_rank, 9, dtype=torch.float64) for data_rank in range(2)]
    with torch.no_grad():
        model.eval()(images[layout.data_rank])
    model.train()
    for _ in range(2):
        for each in (single, model):
            each.zero_grad()
        sum(single(each).square().mean() / 2 for each in images).backward()
        model(images[layout.data_rank]).square().mean().backward()
        for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("way", ["like the image", "made", "of numbers"])
def test_tables_for_the_sizes_of_a_data_rank_s_images_are_its_own(way):
    run_ranks(_of_other_sizes, 4, way)


def _fails():
    layout = make_layout({"w": 2})
    model = torchtp.parallelize(_make("codebook", "replaced"), layout)
    model(_images(0, 0))
    before = model[1].means.clone()
    with model[3].register_forward_pre_hook(lambda *call: 1 / 0), pytest.raises(ZeroDivisionError):
        model(_images(1, 0))
    assert type(model[1].means) is torch.Tensor
    torch.testing.assert_close(model[1].means, before)


def test_buffers_are_plain_after_a_forward_that_failed():
    run_ranks(_fails, 2)
