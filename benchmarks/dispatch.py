"""What torchtp adds to an op on a tiny tensor: the op on a cut DTensor : the same op on a plain tensor as large as a shard.

    python -m benchmarks.dispatch

Two ranks. The halo exchange does nothing in "added", so that only the way through the dispatcher is counted; "with
halos" is the same with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torchtp
from benchmarks.common import Spread, measure, parser, report, run_ranks, slowest
from torchtp import _C

CHANNELS, HEIGHT, WIDTH = 4, 8, 16


def _ops() -> dict[str, Callable[[Tensor], Tensor]]:
    kernel, point = torch.randn(CHANNELS, CHANNELS, 3, 3), torch.randn(CHANNELS, CHANNELS, 1, 1)
    depthwise = torch.randn(CHANNELS, 1, 7, 7)
    for weight in (kernel, point, depthwise):
        weight.requires_grad_()
    return {
        "conv2d 3x3": lambda x: F.conv2d(x, kernel, padding=1),
        "conv2d 7x7 depthwise": lambda x: F.conv2d(x, depthwise, padding=3, groups=CHANNELS),
        "conv2d 2x2 stride 2": lambda x: F.conv2d(x, kernel[:, :, :2, :2], stride=2),
        "conv2d 1x1": lambda x: F.conv2d(x, point),
        "max_pool2d 3x3": lambda x: F.max_pool2d(x, 3, 2, 1),
        "avg_pool2d 2x2": lambda x: F.avg_pool2d(x, 2),
        "interpolate bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "relu": F.relu,
        "add": lambda x: x + x,
    }


def measure_all(names: list[str], repeat: int, inner: int) -> list[dict[str, Any]]:
    """Seconds of every op, forward alone and forward with backward, on this rank."""
    layout = torchtp.Layout(init_device_mesh("cpu", (2,), mesh_dim_names=("w",)), spatial={"w": -1})
    group = layout.spatial_mesh.get_group(0).group_name
    torch.manual_seed(0)
    ops = _ops()
    plain = torch.randn(1, CHANNELS, HEIGHT, WIDTH // 2)
    cut = layout.shard(torch.randn(1, CHANNELS, HEIGHT, WIDTH)).detach()
    results = []
    for name in names:
        op = ops[name]
        row: dict[str, Any] = {"op": name}
        for what, source, exchange in (("plain", plain, "auto"), ("cut", cut, "none"), ("halos", cut, "auto")):
            _C.set_exchange(group, exchange)
            leaf = source.clone().requires_grad_()
            output = op(leaf)
            grad = output.detach().clone()

            def forward(op: Callable[[Tensor], Tensor] = op, source: Tensor = source) -> None:
                with torch.no_grad():
                    op(source)

            def both(op: Callable[[Tensor], Tensor] = op, leaf: Tensor = leaf, grad: Tensor = grad) -> None:
                op(leaf).backward(grad)
                leaf.grad = None

            for way, run in (("forward", forward), ("both", both)):
                dist.barrier()
                row[f"{what}_{way}"] = measure(run, repeat, inner=inner)
        _C.set_exchange(group, "auto")
        results.append(row)
    return results


def main() -> None:
    args = parser(__doc__).parse_args()
    names = ["conv2d 3x3", "relu"] if args.quick else list(_ops())
    repeat, inner = (3, 3) if args.quick else (args.repeat, 50)
    rows = []
    for per_rank in zip(*run_ranks(measure_all, 2, names, repeat, inner), strict=True):
        keys = [f"{what}_{way}" for what in ("plain", "cut", "halos") for way in ("forward", "both")]
        seconds = {key: slowest([result[key] for result in per_rank]) for key in keys}
        row: dict[str, Any] = {"op": per_rank[0]["op"]}
        row |= {f"{key}_s": Spread.of(values) for key, values in seconds.items()}
        for way in ("forward", "both"):
            pairs = zip(seconds[f"cut_{way}"], seconds[f"plain_{way}"], strict=True)
            row[f"added_{way}_s"] = Spread.of([a - b for a, b in pairs])
        rows.append(row)
    report(
        "dispatch",
        rows,
        {
            "op": lambda row: row["op"],
            "plain, us": lambda row: row["plain_forward_s"].text(1e6),
            "added, us": lambda row: row["added_forward_s"].text(1e6),
            "with halos, us": lambda row: row["halos_forward_s"].text(1e6),
            "with backward: plain, us": lambda row: row["plain_both_s"].text(1e6),
            "added, us ": lambda row: row["added_both_s"].text(1e6),
            "with halos, us ": lambda row: row["halos_both_s"].text(1e6),
        },
        args.out,
    )


if __name__ == "__main__":
    main()
