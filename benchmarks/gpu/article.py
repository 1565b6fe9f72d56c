"""The article's workload: ConvNeXt-XL on (7, 3, 512, 1024), Adam: memory and time of a step on one card.

    python -m benchmarks.gpu.article               # eager: the reference, the best of stock PyTorch, torchtp's layers
    python -m benchmarks.gpu.article --compiled    # the last two with torch.compile, block by block

(a) is written as PyTorch's own example: layer norm of elementwise ops, 1x1 convolutions, channels first. (b) is the best
stock PyTorch: channels last, Linear for 1x1, its fused layer norm, the fused optimizer. (c) is (b) with torchtp's layers,
as in examples/fused.py, whose blocks compute the GELU again in backward instead of keeping it. All begin with the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.part import Part, main

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from fused import FusedBlock, channel_norm
from networks import Block, ChannelNorm, Classifier, ConvNeXt

SHAPE = (7, 3, 512, 1024)
DEPTHS, DIMS = [3, 3, 27, 3], [256, 512, 1024, 2048]
WARMUP, STEPS = 3, 5


class NaiveNorm(nn.Module):
    """LayerNorm over C of [N, C, H, W], an op after the other."""

    def __init__(self, num_channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class NaiveBlock(nn.Module):
    """The block with 1x1 convolutions and that norm."""

    def __init__(self, num_channels: int, drop_path: float):
        super().__init__()
        self.depthwise = nn.Conv2d(num_channels, num_channels, 7, padding=3, groups=num_channels)
        self.norm = NaiveNorm(num_channels)
        self.expand = nn.Conv2d(num_channels, 4 * num_channels, 1)
        self.project = nn.Conv2d(4 * num_channels, num_channels, 1)
        self.scale = nn.Parameter(torch.full((num_channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(F.gelu(self.expand(self.norm(self.depthwise(x)))))
        return x + self.scale[:, None, None] * y


@dataclass(frozen=True)
class Variant:
    """One way to write and run the network."""

    name: str
    block: type[nn.Module]
    norm: Callable[[int], nn.Module]
    channels_last: bool = True
    fused_optimizer: bool = True
    checkpointing: bool = False


REFERENCE = Variant("(a) reference", NaiveBlock, NaiveNorm, False, False)
CHECKPOINTED = Variant("(a) reference, checkpointed", NaiveBlock, NaiveNorm, False, False, True)
STOCK = Variant("(b) best stock", Block, ChannelNorm)
OURS = Variant("(c) torchtp", FusedBlock, channel_norm)
PRECISIONS = ("fp32", "tf32", "bf16")  # bf16: autocast over fp32 parameters


def _network(variant: Variant, depths: list[int], dims: list[int]) -> nn.Module:
    """With the numbers that the reference draws: blocks may draw in another order, or twice."""

    def drawn(block: type[nn.Module], norm: Callable[[int], nn.Module]) -> nn.Module:
        return Classifier(ConvNeXt(depths, dims, 3, 0.0, variant.checkpointing, block, norm), dims[-1])

    if variant.block is not FusedBlock:
        return drawn(variant.block, variant.norm)
    begin = drawn(Block, ChannelNorm).state_dict()
    network = drawn(variant.block, variant.norm)
    network.load_state_dict(begin)
    return network


def measure(part: Part, variant: Variant, precision: str, compiled: bool) -> dict[str, Any]:
    """Median seconds of a step and what the allocator held at most."""
    cuda = part.device.type == "cuda"
    shape, depths, dims = ((1, 3, 32, 32), [1, 1, 1, 1], [8, 8, 16, 16]) if part.dry else (SHAPE, DEPTHS, DIMS)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.benchmark = variant.fused_optimizer  # the reference is run as it is written
    before = torch.cuda.memory_allocated() if cuda else 0
    torch.manual_seed(0)
    with part.device:
        network = _network(variant, depths, dims)
        torch.manual_seed(1)  # the same images, however often the network was drawn
        images, labels = torch.randn(shape), torch.randint(1000, (shape[0],))
    layout = torch.channels_last if variant.channels_last else torch.contiguous_format
    network, images = network.to(memory_format=layout), images.contiguous(memory_format=layout)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, fused=variant.fused_optimizer or None)
    if compiled:
        # Block by block: the same kernels as the whole network at a fraction of the time to compile.
        for module in network.modules():
            if isinstance(module, Block):
                module.compile(fullgraph=True, dynamic=False, backend="aot_eager" if part.dry else "inductor")
    autocast: Any = (
        torch.autocast(part.device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    )

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = F.cross_entropy(network(images).float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    began = time.perf_counter()
    first = step().item()
    warm = time.perf_counter() - began
    for _ in range(1 if part.dry else WARMUP - 1):
        step()
    part.synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    taken = []
    loss = first
    for _ in range(2 if part.dry else STEPS):
        began = time.perf_counter()
        loss = step().item()  # waits for the device
        taken.append(time.perf_counter() - began)
    row = {
        "variant": variant.name,
        "precision": precision,
        "compiled": compiled,
        "step_s": statistics.median(taken),
        "steps_s": taken,
        "first_step_s": warm,
        "first_loss": first,
        "last_loss": loss,
        "parameters": sum(p.numel() for p in network.parameters()),
        "shape": list(shape),
    }
    if cuda:
        gib = 2**30
        row["peak_allocated_GiB"] = torch.cuda.max_memory_allocated() / gib
        row["peak_reserved_GiB"] = torch.cuda.max_memory_reserved() / gib
        row["allocated_before_GiB"] = before / gib
    if compiled:
        torch._dynamo.reset()
    return row


def cases(compiled: bool) -> list[tuple[Variant, str]]:
    """By value: what the targets compare first."""
    if compiled:
        return [(OURS, "bf16"), (STOCK, "bf16"), (OURS, "tf32"), (STOCK, "tf32")]
    found = [(REFERENCE, "fp32"), (OURS, "fp32"), (STOCK, "fp32"), (CHECKPOINTED, "fp32")]
    for precision in ("tf32", "bf16"):
        found += [(variant, precision) for variant in (OURS, STOCK, REFERENCE)]
    return found


def run(part: Part, options: argparse.Namespace) -> None:
    for variant, precision in cases(options.compiled):
        name = f"{variant.name}, {precision}{', compiled' if options.compiled else ''}"
        seconds = 100.0 if options.compiled else 40.0
        part.case(
            name,
            lambda variant=variant, precision=precision: measure(part, variant, precision, options.compiled),  # type: ignore[misc]
            seconds,
        )


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compiled", action="store_true", help="with torch.compile")


if __name__ == "__main__":
    main(__doc__, run, flags)
