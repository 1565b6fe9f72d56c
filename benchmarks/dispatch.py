"""What torchtp adds to an op on a tiny tensor: the op on a cut DTensor : the same op on a plain tensor as large as a shard.

    python -m benchmarks.dispatch

Two ranks. A chain of equal ops is timed, as in a network, and the time of one is given. The halo exchange does nothing
in "added", so that only the way through the dispatcher is counted; "with halos" is the same with it.
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
CHAIN = 8


def _ops() -> dict[str, tuple[Callable[[Tensor], Tensor], int]]:
    kernel, point, halving = (torch.randn(CHANNELS, CHANNELS, size, size) / CHANNELS for size in (3, 1, 2))
    depthwise = torch.randn(CHANNELS, 1, 7, 7) / 7
    for weight in (kernel, point, halving, depthwise):
        weight.requires_grad_()

    def resample(x: Tensor, factor: float) -> Tensor:
        return F.interpolate(x, scale_factor=factor, mode="bilinear")

    # With it, how many ops it is: what changes the size of a map is followed by what changes it back.
    return {
        "conv2d 3x3": (lambda x: F.conv2d(x, kernel, padding=1), 1),
        "conv2d 7x7 depthwise": (lambda x: F.conv2d(x, depthwise, padding=3, groups=CHANNELS), 1),
        "conv2d, conv_transpose2d 2x2": (
            lambda x: F.conv_transpose2d(F.conv2d(x, halving, stride=2), halving, stride=2),
            2,
        ),
        "conv2d 1x1": (lambda x: F.conv2d(x, point), 1),
        "max_pool2d 3x3": (lambda x: F.max_pool2d(x, 3, 1, 1), 1),
        "avg_pool2d 3x3": (lambda x: F.avg_pool2d(x, 3, 1, 1), 1),
        "interpolate bilinear": (lambda x: resample(resample(x, 2), 0.5), 2),
        "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), 1),
        "relu": (F.relu, 1),
        "add": (lambda x: x + x, 1),
    }


def _chain(op: Callable[[Tensor], Tensor], length: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for _ in range(length):
            x = op(x)
        return x

    return run


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
        single, number = ops[name]
        op = _chain(single, CHAIN // number)
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
                row[f"{what}_{way}"] = [seconds / CHAIN for seconds in measure(run, repeat, inner=inner)]
        _C.set_exchange(group, "auto")
        results.append(row)
    return results


def main() -> None:
    args = parser(__doc__).parse_args()
    names = ["conv2d 3x3", "relu"] if args.quick else list(_ops())
    repeat, inner = (3, 3) if args.quick else (args.repeat, 20)
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
