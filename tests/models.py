"""Small networks of the kinds people train, plain PyTorch, and the layouts tests put them on."""

import torch
import torch.nn.functional as F
from ranks_device import make_mesh
from torch import nn

import torchtp


def make_layout(axes, spatial=None, data=None):
    """A layout on a mesh {"dp": 2, "w": 2}: axes named h and w cut H and W, dp is data."""
    mesh = make_mesh(axes.values(), axes)
    dims = {"h": -2, "w": -1}
    return torchtp.Layout(mesh, {name: dims[name] for name in axes if name in dims}, "dp" if "dp" in axes else None)


class Fault(torch.autograd.Function):
    """Passes on what it is given; its backward may raise."""

    @staticmethod
    def forward(ctx, x, raises):
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.raises:
            raise ArithmeticError("no gradient today")
        return grad, None


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.rate == 0 or not self.training:
            return x
        keep = 1 - self.rate
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    """ConvNeXt's: depthwise 7x7, LayerNorm over C, MLP in channels-last, layer scale, DropPath."""

    def __init__(self, channels, drop=0.0):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.expand = nn.Linear(channels, 2 * channels)
        self.project = nn.Linear(2 * channels, channels)
        self.gamma = nn.Parameter(torch.linspace(0.3, 0.7, channels))
        self.drop = DropPath(drop)

    def forward(self, x):
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.project(F.gelu(self.expand(self.norm(y))))
        return x + self.drop((self.gamma * y).permute(0, 3, 1, 2))


def convnext(drop=0.0):
    return nn.Sequential(nn.Conv2d(2, 4, 2, stride=2), Block(4, drop), Block(4, drop), nn.Conv2d(4, 1, 3, padding=1))


def batch_norm_net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU(),
        nn.Conv2d(4, 1, 1),
    )


class UNet(nn.Module):
    """One level down and up again: strided and transposed convolution, group norm, a skip, an offset born in forward."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(2, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1)
        self.leave = nn.Conv2d(8, 1, 3, padding=1)
        self.register_buffer("mean", torch.tensor([0.1, -0.2]).view(1, 2, 1, 1))

    def forward(self, x):
        x = F.silu(self.enter(x - self.mean))
        y = F.silu(self.norm(self.down(x)))
        y = self.up(y) + torch.arange(4, dtype=x.dtype, device=x.device).view(4, 1, 1)
        return self.leave(torch.cat([x, y], 1))


NETWORKS = {"convnext": convnext, "batch_norm": batch_norm_net, "unet": UNet}


def make_network(name, *args, dtype=torch.float64):
    torch.manual_seed(11)
    return NETWORKS[name](*args).to(dtype)
