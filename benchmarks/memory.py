"""Bytes kept for backward on the fullest rank : on a single device.

    python -m benchmarks.memory

Distinct storages that autograd holds after forward, without those of parameters and of the input image.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchtp
from benchmarks.common import parser, report, run_ranks
from torchtp.planning.measure import SavedBytes

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from networks import Classifier, ConvNeXt, DisparityNet


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(num_inputs, num_outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_outputs, num_outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(num_outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or num_inputs != num_outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False), nn.BatchNorm2d(num_outputs)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.branch(x) + self.shortcut(x))


def resnet(dims: list[int]) -> nn.Module:
    """A ResNet-18 of the given widths."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, dims[0], 7, 2, 3, bias=False),
        nn.BatchNorm2d(dims[0]),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    for number, (before, after) in enumerate(zip([dims[0], *dims], dims, strict=False)):
        layers += [Residual(before, after, 1 if number == 0 else 2), Residual(after, after, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dims[-1], 100))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ConvNeXt-T 256 x 512": (
        lambda: Classifier(ConvNeXt([3, 3, 9, 3], [96, 192, 384, 768], 3, 0.0), 768),
        (1, 3, 256, 512),
    ),
    "ResNet-18 256 x 512": (lambda: resnet([64, 128, 256, 512]), (1, 3, 256, 512)),
    "disparity 250 x 371": (lambda: DisparityNet([1, 1, 2], [16, 32, 64], 0.0), (1, 6, 250, 371)),
    "tiny": (lambda: DisparityNet([1, 1], [8, 16], 0.0), (1, 6, 64, 96)),
}
MESHES: list[dict[str, int]] = [{"w": 2}, {"h": 2}, {"w": 4}, {"h": 4}, {"h": 2, "w": 2}]


def kept(name: str, mesh: dict[str, int]) -> int:
    """Bytes this rank keeps; without a mesh those of the single device."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network, images = make(), torch.randn(shape)
    excluded = list(network.parameters())
    if mesh:
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        layout = torchtp.Layout(device_mesh, spatial={axis: {"h": -2, "w": -1}[axis] for axis in mesh})
        torchtp.parallelize(network, layout)
        images = layout.shard(images)
        excluded.append(images.to_local())
    else:
        excluded.append(images)
    with SavedBytes(excluded) as saved:
        output = network(images)
    num_bytes = saved.num_bytes
    output.sum().backward()  # so that no rank leaves before the others are done
    dist.barrier()
    return num_bytes


def main() -> None:
    args = parser(__doc__, times=False).parse_args()
    rows: list[dict[str, Any]] = []
    for name in ["tiny"] if args.quick else [name for name in NETWORKS if name != "tiny"]:
        single = run_ranks(kept, 1, name, {})[0]
        for mesh in MESHES[:1] if args.quick else MESHES:
            ranks = 1
            for size in mesh.values():
                ranks *= size
            fullest = max(run_ranks(kept, ranks, name, mesh))
            rows.append({"network": name, "mesh": mesh, "ranks": ranks, "single_bytes": single, "bytes": fullest})
    report(
        "memory",
        rows,
        {
            "network": lambda row: row["network"],
            "mesh": lambda row: " x ".join(f"{axis}={size}" for axis, size in row["mesh"].items()),
            "single device, MiB": lambda row: f"{row['single_bytes'] / 2**20:,.1f}",
            "fullest rank, MiB": lambda row: f"{row['bytes'] / 2**20:,.1f}",
            "share": lambda row: f"{row['bytes'] / row['single_bytes']:.3f}",
        },
        args.out,
    )


if __name__ == "__main__":
    main()
