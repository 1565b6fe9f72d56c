"""What one rank does alone with what all ranks hold, what data ranks write in forward, parts that were taken away."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import prune

import torchtp
from torchtp.testing import run_ranks


def _layout(data: int = 1) -> torchtp.Layout:
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("dp", "w"))
    return torchtp.Layout(mesh, spatial={"w": -1}, data="dp")


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.log_scale, self.shift = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        y = self.conv(x) * self.log_scale.exp().view(-1, 1, 1) + self.shift.view(-1, 1, 1)
        return y[..., 1] + y[..., 0]


def _gradients(layout, how: str):
    torch.manual_seed(0)
    net = _Scaled().double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    history, alone = torch.zeros(3, dtype=torch.float64), layout is not None and dist.get_rank() == 0
    if layout is not None:
        torchtp.parallelize(net, layout)
    for step in range(3):
        out = net(x)
        loss = F.mse_loss(out, torch.zeros_like(out))
        if alone and how == "slice":
            layout.replicate(torch.zeros(2, 4, 8, 8, dtype=torch.float64))[:1, :1].to_local().mean()
        if alone and how == "undetached":
            history[step] = loss
        loss.backward()
        if alone and how == "detached":
            history[step] = loss.detach()
        if alone and how == "without gradients":
            with torch.no_grad():
                history[step] += loss
    return [parameter.grad for parameter in net.parameters()]


def _one_rank_alone(how: str) -> None:
    torch.testing.assert_close(_gradients(_layout(), how), _gradients(None, how))


@pytest.mark.parametrize("how", ["slice", "undetached", "detached", "without gradients"])
def test_one_rank_looks_at_what_all_hold(how):
    run_ranks(_one_rank_alone, 2, how, backend="torchtp")


class _First(nn.Module):
    """Takes something of its first images, and refuses them where `refuses`."""

    def __init__(self, what: str, refuses: bool):
        super().__init__()
        self.conv, self.what, self.calls, self.refuses = nn.Conv2d(3, 4, 3, padding=1), what, 0, refuses
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        if self.calls == 1:
            with torch.no_grad():
                mean = self.conv(x).mean((0, 2, 3))
                if self.what == "weights":
                    self.conv.weight.mul_(mean.view(-1, 1, 1, 1))
                elif self.what == "buffer":
                    self.centre.copy_(mean)
                else:
                    self.centre = mean.full_tensor()
            if self.refuses and self.what != "replaced":
                raise FloatingPointError
        return self.conv(x) - self.centre.view(-1, 1, 1)


def _written(what: str, refuses: bool) -> list[torch.Tensor]:
    layout = _layout(2)
    net = torchtp.parallelize(_First(what, refuses).double(), layout)
    torch.manual_seed(layout.data_rank)
    for _ in range(3):
        try:
            net(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().mean().backward()
        except FloatingPointError:
            continue
    return [tensor.detach() for tensor in net.state_dict().values()]


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("what", ["weights", "buffer", "replaced"])
def test_what_forward_writes_is_alike(what, refuses):
    first, *others = run_ranks(_written, 4, what, refuses, backend="torchtp")
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


class _Headed(nn.Module):
    def __init__(self, head: nn.Module):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), head

    def forward(self, x):
        return self.head(self.conv(x).relu())


def _taken_away(how: str) -> int:
    layout = _layout(2)
    net = torchtp.parallelize(_Headed(nn.Conv2d(3, 3, 1)), layout, output="full")
    x = torch.ones(2, 3, 8, 8)
    net(x).square().mean().backward()
    head, net.head = net.head, nn.Identity()
    if how == "moved":
        head.zero_grad()
        other = torchtp.parallelize(_Headed(head), layout, output="full")
        other(x).square().mean().backward()
        return len(list(other.parameters()))
    if layout.data_rank == 0:
        net.eval()(x)  # with gradients, a saliency map
    net.train()(x).square().mean().backward()
    return len(net._torchtp._reducer.parameters) + 2


@pytest.mark.parametrize("how", ["moved", "evaluated"])
def test_a_part_taken_away(how):
    assert run_ranks(_taken_away, 4, how, backend="torchtp") == [4] * 4


def _evaluated_after_functional_call() -> bool:
    net = nn.Sequential(prune.identity(nn.Conv2d(3, 3, 1), "weight"), nn.Conv2d(3, 3, 1))
    torchtp.parallelize(net, _layout(), output="full")
    x = torch.ones(2, 3, 8, 8)
    net(x).sum().backward()
    fast = {name: parameter * 0.9 for name, parameter in net.named_parameters()}
    torch.func.functional_call(net, fast, (x,)).sum().backward()
    prune.remove(net[0], "weight")
    with torch.no_grad():
        return bool(net.eval()(x).isfinite().all())


def test_a_parameter_is_taken_away_after_functional_call():
    assert run_ranks(_evaluated_after_functional_call, 2, backend="torchtp") == [True, True]
