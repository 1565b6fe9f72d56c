"""ConvNeXt, as published and unaware of any mesh, and a stereo network on top of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class DropPath(nn.Module):
    """Drops a residual branch for whole samples (stochastic depth, arXiv:1603.09382).

    The trainer sets `mask` [N, 1, 1, 1] once a step, for the samples of this rank out of the global batch: so all ranks
    that hold parts of one sample agree, and so does a checkpoint's second forward.
    """

    mask: Tensor | None

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability
        self.mask = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0 or self.mask is None:
            return x
        return x * self.mask


def draw_paths(
    model: nn.Module, generator: torch.Generator, global_batch: int, samples: slice, dtype: torch.dtype
) -> None:
    """Gives every DropPath of the model its mask for one step: the part `samples` of a draw for the global batch."""
    for module in model.modules():
        if isinstance(module, DropPath) and module.probability > 0:
            kept = torch.rand(global_batch, generator=generator) >= module.probability
            module.mask = (kept.to(dtype) / (1 - module.probability))[samples].view(-1, 1, 1, 1)


class ChannelNorm(nn.Module):
    """LayerNorm over C of a [N, C, H, W] tensor."""

    def __init__(self, num_channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, 1e-6)
        return y.permute(0, 3, 1, 2)


class Block(nn.Module):
    """The ConvNeXt block (arXiv:2201.03545): depthwise 7x7, LayerNorm over C, MLP with GELU, layer scale, DropPath."""

    def __init__(self, num_channels: int, drop_path: float):
        super().__init__()
        self.depthwise = nn.Conv2d(num_channels, num_channels, 7, padding=3, groups=num_channels)
        self.norm = nn.LayerNorm(num_channels, eps=1e-6)
        self.expand = nn.Linear(num_channels, 4 * num_channels)
        self.project = nn.Linear(4 * num_channels, num_channels)
        self.scale = nn.Parameter(torch.full((num_channels,), 1e-6))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.project(F.gelu(self.expand(y)))
        return x + self.drop_path(y.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    """The feature maps of a ConvNeXt at strides 4, 8, 16, ..., one for each stage.

    Input [N, in_channels, H, W] of any size; output a list of [N, dims[i], h_i, w_i]. `block` and `norm` may be others of
    the same parameters, as those of fused.py.
    """

    def __init__(
        self,
        depths: Sequence[int],
        dims: Sequence[int],
        in_channels: int = 3,
        drop_path: float = 0.1,
        checkpointing: bool = False,
        block: type[Block] = Block,
        norm: Callable[[int], nn.Module] = ChannelNorm,
    ):
        super().__init__()
        self.checkpointing = checkpointing
        rates = torch.linspace(0, drop_path, sum(depths)).tolist()
        self.downsample = nn.ModuleList()
        self.stages = nn.ModuleList()
        for i, (depth, dim) in enumerate(zip(depths, dims, strict=True)):
            if i == 0:
                self.downsample.append(nn.Sequential(nn.Conv2d(in_channels, dim, 4, stride=4), norm(dim)))
            else:
                self.downsample.append(nn.Sequential(norm(dims[i - 1]), nn.Conv2d(dims[i - 1], dim, 2, stride=2)))
            first = sum(depths[:i])
            self.stages.append(nn.ModuleList(block(dim, rates[first + j]) for j in range(depth)))

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for downsample, blocks in zip(self.downsample, self.stages, strict=True):
            x = downsample(x)
            for block in blocks:  # type: ignore[attr-defined]
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
            features.append(x)
        return features


class Classifier(nn.Module):
    """ConvNeXt with its head: global average pooling, LayerNorm, Linear. Output [N, num_classes]."""

    def __init__(self, encoder: ConvNeXt, num_channels: int, num_classes: int = 1000):
        super().__init__()
        self.encoder = encoder
        self.norm = nn.LayerNorm(num_channels, eps=1e-6)
        self.head = nn.Linear(num_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.encoder(x)[-1].mean((-2, -1))))


class Merge(nn.Module):
    """Brings a coarse map to the size of a finer one (bilinear), joins them and mixes the channels."""

    def __init__(self, coarse: int, fine: int, out: int):
        super().__init__()
        self.mix = nn.Conv2d(coarse + fine, out, 3, padding=1)
        self.norm = nn.GroupNorm(1, out)

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        coarse = F.interpolate(coarse, size=fine.shape[-2:], mode="bilinear", align_corners=False)
        return F.gelu(self.norm(self.mix(torch.cat([coarse, fine], 1))))


class DisparityNet(nn.Module):
    """Disparity of the left image of a rectified stereo pair.

    Input [N, 6, H, W] (left and right, stacked), output [N, 1, H, W] in units of `unit` pixels.
    """

    def __init__(self, depths: Sequence[int], dims: Sequence[int], drop_path: float = 0.1, checkpointing: bool = False):
        super().__init__()
        self.encoder = ConvNeXt(depths, dims, 6, drop_path, checkpointing)
        self.merge = nn.ModuleList(Merge(dims[i + 1], dims[i], dims[i]) for i in reversed(range(len(dims) - 1)))
        # Few channels at full resolution: that is where the pixels are.
        self.reduce = nn.Conv2d(dims[0], 8, 1)
        self.finest = Merge(8, 6, 8)
        self.head = nn.Conv2d(8, 1, 3, padding=1)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(module.weight, std=0.02 if isinstance(module, nn.Linear) else 0.05)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            nn.init.constant_(module.scale, 0.1)

    def forward(self, pair: Tensor) -> Tensor:
        *finer, x = self.encoder(pair)
        for merge, fine in zip(self.merge, reversed(finer), strict=True):
            x = merge(x, fine)
        return self.head(self.finest(self.reduce(x), pair))
