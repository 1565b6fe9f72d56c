"""torchtp.nn: layers on cut images equal torch.nn's on whole ones, and are torch.nn's on plain tensors."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from models import make_layout, make_network
from torch import nn
from torch.distributed.tensor import DTensor

import torchtp
from torchtp.testing import run_ranks


def _mean_over(group, tensor):
    mean = tensor.clone()
    dist.all_reduce(mean, group=group)
    return mean / group.size()


def _check(layout, theirs, shape):
    """Output, gradients of input and parameters, buffers and double backward of both on the same image."""
    mine = torchtp.nn.convert(copy.deepcopy(theirs), layout)
    assert all(type(part).__module__.startswith("torchtp.nn") for part in mine.modules() if part._parameters)
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(shape, generator=generator, dtype=torch.float64)
    whole = image.clone().requires_grad_()
    tile = image[layout.tile(shape)].clone().requires_grad_()
    expected, actual = theirs(whole), mine(layout.from_tile(tile, shape))
    assert isinstance(actual, DTensor) and actual.shape == expected.shape
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * weight).square().sum().backward()
    (actual.full_tensor() * weight).square().sum().backward()
    torch.testing.assert_close(tile.grad, whole.grad[layout.tile(shape)], rtol=1e-9, atol=1e-10)
    for (name, mine_p), theirs_p in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        gradient = _mean_over(layout.group, mine_p.grad)
        torch.testing.assert_close(
            gradient, theirs_p.grad, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: name + text
        )
    torch.testing.assert_close(dict(mine.named_buffers()), dict(theirs.named_buffers()), rtol=1e-10, atol=1e-10)
    assert list(mine.state_dict()) == list(theirs.state_dict())


LAYERS = {
    "conv": (lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 2, 7, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1), (2, 2, 7, 9)),
    "conv 1d": (lambda: nn.Conv1d(2, 4, 5, padding=2, groups=2), (2, 2, 9)),
    "conv 3d": (lambda: nn.Conv3d(2, 4, 3, padding=1), (1, 2, 3, 5, 7)),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1), (2, 2, 7, 9)),
    "average pool": (lambda: nn.AvgPool2d(3, 2, 1), (2, 2, 7, 9)),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d(2), (2, 2, 7, 9)),
    "batch norm": (lambda: nn.BatchNorm2d(2), (2, 2, 7, 9)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 7, 9)),
    "instance norm": (lambda: nn.InstanceNorm2d(2, affine=True), (2, 2, 7, 9)),
    "layer norm": (lambda: LayerNorm2d(2), (2, 2, 7, 9)),
    "linear": (lambda: nn.Sequential(Permute(0, 2, 3, 1), nn.Linear(2, 3), Permute(0, 3, 1, 2)), (2, 2, 7, 9)),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 2, 7, 9)),
    "nearest": (lambda: nn.Upsample(size=(10, 11)), (2, 2, 7, 9)),
    "no images": (lambda: nn.Upsample(scale_factor=0.5, mode="nearest-exact"), (0, 2, 2, 6)),
}


class LayerNorm2d(nn.LayerNorm):
    """As torchvision and timm write it."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Permute(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return x.permute(self.dims)


def _layer(axes, name):
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    make, shape = LAYERS[name]
    torch.manual_seed(2)
    _check(make_layout(axes), make().double(), shape)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("axes", [{"w": 2}, {"w": 3}], ids=str)
def test_layers_equal_those_of_torch(axes, name):
    run_ranks(_layer, axes["w"], axes, name)


def _padded(axes, mode, kernel, stride, padding, dilation, shape):
    torch.manual_seed(2)
    kind = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
    layer = kind(2, 4, kernel, stride, padding, dilation, groups=2, padding_mode=mode).double()
    with torchtp.strict():
        _check(make_layout(axes), layer, shape)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    "axes, kernel, stride, padding, dilation, shape",
    [
        ({"w": 1}, 3, 1, 1, 1, (1, 2, 6, 7)),
        ({"w": 2}, 3, 1, 1, 1, (2, 2, 6, 7)),
        ({"w": 2}, 5, 2, 4, 1, (1, 2, 6, 7)),
        ({"w": 2}, 3, 3, 4, 2, (1, 2, 8)),
        ({"w": 2}, 3, 1, "same", 2, (1, 2, 6, 7)),
        ({"w": 3}, 3, 2, 2, 1, (1, 2, 3, 4)),
        ({"w": 3}, (1, 5), 3, (0, 2), 1, (1, 2, 2, 3)),
        ({"h": 2, "w": 2}, 3, 1, 1, 1, (1, 2, 5, 7)),
        ({"h": 2, "w": 2}, 3, 1, 1, 1, (1, 2, 3, 5, 7)),
        ({"dp": 2, "w": 2}, 3, 1, 1, 1, (1, 2, 5, 7)),
    ],
)
def test_every_padding_mode_without_a_gather(axes, mode, kernel, stride, padding, dilation, shape):
    run_ranks(_padded, torch.Size(axes.values()).numel(), axes, mode, kernel, stride, padding, dilation, shape)


def _padded_under_autocast(mode):
    layout = make_layout({"w": 4})
    theirs = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    mine = torchtp.nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
    mine.load_state_dict(theirs.state_dict())
    image = torch.randn(1, 2, 6, 5)  # of which the last rank has no column
    with torch.autocast("cpu", torch.bfloat16):
        expected, output = theirs(image), mine(layout.shard(image))
    assert output.to_local().dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(output.full_tensor(), expected)


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_ranks_without_columns_have_the_dtype_of_the_others(mode):
    run_ranks(_padded_under_autocast, 4, mode)


def _one_column_of_16_bit(mode):
    layout = make_layout({"w": 2})
    torch.manual_seed(0)
    theirs = nn.Conv2d(2, 6, 2, 3, (4, 0), (1, 2), padding_mode=mode).bfloat16()
    mine = torchtp.nn.convert(copy.deepcopy(theirs), layout)
    image = torch.randn(3, 2, 17, 11).bfloat16()  # of the three columns of the output the last rank has one
    torch.testing.assert_close(mine(layout.shard(image)).full_tensor(), theirs(image))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_one_output_column_with_a_stride(mode):
    run_ranks(_one_column_of_16_bit, 2, mode)


def _penalty(network, image):
    (slopes,) = torch.autograd.grad(network(image).sum(), image, create_graph=True)
    (slopes.flatten(1).norm(dim=1) - 1).square().mean().backward()


def _penalties(mode):
    layout = make_layout({"w": 2})
    torch.manual_seed(0)
    last = nn.Conv2d(3, 1, 4, 4, 1, padding_mode=mode)  # one column, of the first rank, made of columns of both
    theirs = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), nn.Tanh(), last).double()
    mine = torchtp.parallelize(torchtp.nn.convert(copy.deepcopy(theirs), layout), layout, output="full")
    image = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    for network in (theirs, mine):
        _penalty(network, image.clone().requires_grad_())
    for ours, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(ours.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_ranks_without_columns_take_part_in_second_derivatives(mode):
    run_ranks(_penalties, 2, mode)


def _too_much_padding():
    layout = make_layout({"w": 2})
    layer = torchtp.nn.Conv2d(2, 2, 3, padding=4, padding_mode="reflect")
    with pytest.raises(
        ValueError, match="reflect padding of dim 2 takes at most 3 rows of an image of extent 4, got 4"
    ):
        layer(layout.shard(torch.zeros(1, 2, 4, 9)))


def _too_large():
    layout = make_layout({"w": 2})
    for mode, rows in (("zeros", 6), ("replicate", 6), ("circular", 6)):
        layer = torchtp.nn.Conv2d(2, 2, (rows, 9), padding_mode=mode)
        with pytest.raises((RuntimeError, ValueError), match="does not fit into dim 2 of"):
            layer(layout.shard(torch.zeros(1, 2, 4, 9)))  # one column, of the first rank


def test_kernels_larger_than_the_image_are_refused_by_all_ranks():
    run_ranks(_too_large, 2)


def test_too_much_padding_is_refused():
    run_ranks(_too_much_padding, 2)


def _converted():
    warnings.simplefilter("ignore", torchtp.GatherWarning)
    layout = make_layout({"w": 2})
    single = make_network("unet")
    model = torchtp.nn.convert(copy.deepcopy(single), layout)
    assert {type(m).__module__.split(".")[0] for m in model.children()} == {"torchtp"}
    image = torch.randn(2, 2, 13, 17, dtype=torch.float64)
    torch.testing.assert_close(model(image), single(image))  # a plain tensor: as before
    torchtp.parallelize(model, layout, output="full")
    torch.testing.assert_close(model(image), single(image), rtol=1e-10, atol=1e-10)
    assert list(model.state_dict()) == list(single.state_dict())
    assert type(copy.deepcopy(model).norm).__name__ == "GroupNorm"


def test_a_converted_network_can_be_parallelized():
    run_ranks(_converted, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, None), "a torch.nn.Module and a torchtp.Layout, but the first is a int"),
        ((nn.ReLU(), "w=2"), "convert takes a torchtp.Layout, but it is a str"),
    ],
)
def test_what_is_of_another_type_is_not_converted(arguments, message):
    with pytest.raises(TypeError, match=message):
        torchtp.nn.convert(*arguments)


def test_layers_need_no_process_group_for_plain_tensors():
    torch.manual_seed(0)
    image = torch.randn(2, 2, 7, 9)
    for name in ("Conv2d", "ConvTranspose2d"):
        theirs, mine = getattr(nn, name)(2, 3, 3, padding=1), getattr(torchtp.nn, name)(2, 3, 3, padding=1)
        mine.load_state_dict(theirs.state_dict())
        assert torch.equal(mine(image), theirs(image)) and repr(mine) == repr(theirs)
    assert torch.equal(torchtp.nn.BatchNorm2d(2)(image), nn.BatchNorm2d(2)(image))
    expected = nn.LayerNorm(2)(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(torchtp.nn.LayerNorm2d(2)(image), expected)


def _images_of_two_heights():
    layout = make_layout({"h": 3})
    network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 1, 3, padding=1))
    torchtp.nn.convert(network, layout)
    with pytest.raises(RuntimeError) as caught:
        network(layout.shard(torch.rand(1, 2, 18 if dist.get_rank() == 1 else 16, 12)))
    return str(caught.value)


def test_images_of_two_heights_are_an_error_on_all_ranks():
    """Halos of both are as large."""
    first, *others = run_ranks(_images_of_two_heights, 3, backend="torchtp", fresh=True)
    assert set(others) == {first} and "ranks must hold parts of one image" in first
