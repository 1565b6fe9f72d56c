"""SyncBatchNorm of cut images: a data x spatial mesh trains as one device trains BatchNorm on the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import make_layout
from torch import nn
from training import assert_same_parameters, loss_of, make_images, make_optimizer

import torchtp
from torchtp.testing import run_ranks


class Activated(nn.BatchNorm2d):
    """A norm with more in its forward, as timm's BatchNormAct2d; `Synchronized` is what it becomes."""

    def forward(self, x):
        return torch.sin(3 * super().forward(x))


class Synchronized(nn.SyncBatchNorm):
    def forward(self, x):
        return torch.sin(3 * super().forward(x))


def synchronize(model):
    """Converts norms, and leaves those with more in their forward what they are."""
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    for name, module in model.named_children():
        if type(module) is Activated:
            converted[int(name)].__class__ = Synchronized
    return converted


def make_network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None, affine=False),
        nn.SiLU(),
        Activated(4),
        nn.AdaptiveAvgPool2d((1, 3)),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Conv2d(4, 2, 1),
        nn.BatchNorm2d(2),
    ).double()


def _train(axes, sizes):
    layout = make_layout(axes)
    single = make_network()
    model = torchtp.parallelize(synchronize(make_network()), layout, output="full")
    first = sum(sizes[: layout.data_rank])
    mine = slice(first, first + sizes[layout.data_rank])
    with torchtp.strict():
        for step in range(3):
            images = make_images(step, sum(sizes))
            # Gradients are means over data ranks: times their number, they are those of the sum over all images.
            (
                (model(images[mine]) - 0.3).square().mean() * (sizes[layout.data_rank] / len(images)) * layout.num_data
            ).backward()
            loss_of(single(images)).backward()
            for each in (model, single):
                make_optimizer(each).step()
                each.zero_grad()
    assert_same_parameters(model, single)
    images = make_images(7, 2)
    torch.testing.assert_close(copy.deepcopy(model).eval()(images), single.eval()(images), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("axes", "sizes"), [({"w": 2}, [3]), ({"dp": 2, "w": 2}, [2, 2]), ({"dp": 2, "h": 2}, [3, 1])], ids=str
)
def test_statistics_are_those_of_the_whole_batch(axes, sizes):
    run_ranks(_train, torch.Size(axes.values()).numel(), axes, sizes)


def _nothing():
    layout = make_layout({"dp": 2, "w": 2})
    model = torchtp.parallelize(nn.Sequential(nn.Conv2d(2, 4, 3), nn.SyncBatchNorm(4)), layout, output="full")
    model(torch.zeros(0, 2, 8, 8)).sum().backward()
    norm = model[1]
    assert torch.equal(norm.running_var, torch.ones(4)) and torch.equal(norm.running_mean, torch.zeros(4))
    assert all(torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in model.parameters())


def test_a_batch_of_nothing_leaves_everything_as_it_is():
    run_ranks(_nothing, 4)


def _groups():
    layout = make_layout({"dp": 2, "w": 2})
    images = make_images(layout.data_rank, 2)
    means = []
    groups = [layout.group, layout.mesh["dp"].get_group(), layout.spatial_group]
    for group in (*groups, *(dist.new_group([first, 3 - first]) for first in (0, 1))):
        if dist.get_rank() not in dist.get_process_group_ranks(group):
            continue
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.SyncBatchNorm(4, process_group=group)).double()
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        try:
            torchtp.parallelize(model, layout)(images)
        except ValueError as error:
            return [layout.data_rank, *means], str(error)
        means.append(model[1].running_mean[0].item())
    return None


def test_its_process_group_says_whose_statistics():
    results = run_ranks(_groups, 4)
    (_, whole, along, own), _ = results[0]
    assert whole == along != own
    assert all(numbers[1:3] == [whole, along] for numbers, _ in results)
    assert results[3][0][3] != own
    for ranks in ([0, 3], [1, 2]):
        for _, error in (results[rank] for rank in ranks):
            assert f"1, a SyncBatchNorm, has a process group of the ranks {ranks}, which is neither" in error


def _left_alone():
    layout = make_layout({"w": 2})
    images = make_images(0, 3)
    for momentum in (0.1, None):
        single, norm = (kind(2, momentum=momentum).double() for kind in (nn.BatchNorm2d, nn.SyncBatchNorm))
        single.track_running_stats = norm.track_running_stats = False
        torch.testing.assert_close(torchtp.parallelize(norm, layout, output="full")(images), single(images))
        assert norm.running_mean.tolist() == [0, 0] and norm.running_var.tolist() == [1, 1]
        assert norm.num_batches_tracked == 0


def test_running_statistics_that_are_not_tracked_stay():
    run_ranks(_left_alone, 2)


def _one_value():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.SyncBatchNorm(4)).double()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        torchtp.parallelize(model, make_layout({"w": 2}))(make_images(0, 1))
    assert model[2].running_var.tolist() == [1] * 4


def test_one_value_a_channel_is_refused():
    run_ranks(_one_value, 2)
