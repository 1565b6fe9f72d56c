"""What averaging gradients costs a backward: torchtp's reducer : stock DistributedDataParallel, and what of it is hidden.

    python -m benchmarks.gradients

Data-parallel steps of one network on every rank, fp32. "alone" is the same backward without any communication. The ways
are timed in turn in the same processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import Spread, parser, report, run_ranks, slowest
from torchtp.flags import positive_int
from torchtp.gradients import GradientReducer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from networks import Classifier, ConvNeXt

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ConvNeXt-T 192 x 192": (
        lambda: Classifier(ConvNeXt([3, 3, 9, 3], [96, 192, 384, 768], 3, 0.0), 768),
        (1, 3, 192, 192),
    ),
    "tiny": (lambda: Classifier(ConvNeXt([1, 1], [32, 64], 3, 0.0), 64), (1, 3, 64, 64)),
}
WAYS = ["alone", "torchtp", "torchtp bf16", "reducer on gloo", "DDP on torchtp", "DDP on gloo"]


class Way:
    """One way of making gradients global, with a network of its own."""

    def __init__(self, name: str, network: nn.Module, gloo: dist.ProcessGroup):
        self.network = self.run = network
        self.reducer: GradientReducer | None = None
        group = gloo if name.endswith("gloo") else None
        if name.startswith("DDP"):
            self.run = nn.parallel.DistributedDataParallel(network, process_group=group, gradient_as_bucket_view=True)
        elif name != "alone":
            self.reducer = GradientReducer(network, group, compression="bf16" if name.endswith("bf16") else "none")
            self.reducer.record()

    def __call__(self, images: torch.Tensor) -> float:
        """Seconds of a backward."""
        self.network.zero_grad(set_to_none=False)
        loss = self.run(images).square().mean()
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        return time.perf_counter() - start


def measure_all(name: str, repeat: int) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Seconds of a backward each way, and the reducers' statistics of one backward, on this rank."""
    make, shape = NETWORKS[name]
    gloo = dist.new_group(backend="gloo")
    ways = {}
    for way in WAYS:
        torch.manual_seed(0)
        ways[way] = Way(way, make(), gloo)
    torch.manual_seed(dist.get_rank())
    images = torch.randn(shape)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(repeat + 2):
        for label, way in ways.items():
            if turn == 2 and way.reducer:
                way.reducer.reset_statistics()
            taken = way(images)
            if turn >= 2:
                seconds[label].append(taken)
    _check(ways)
    observed = {}
    for label, way in ways.items():
        if way.reducer is None:
            continue
        statistics = way.reducer.statistics
        observed[label] = {
            "buckets": statistics.num_buckets,
            "bytes": statistics.num_bytes / statistics.num_backwards,
            "communication_s": statistics.communication_seconds / statistics.num_backwards,
            "hidden": statistics.hidden_fraction,
        }
    return seconds, observed


def _check(ways: dict[str, Way]) -> None:
    """A figure of a wrong gradient is none."""
    wanted = torch.cat([p.grad.reshape(-1) for p in ways["DDP on gloo"].network.parameters()])  # type: ignore[union-attr]
    for label, way in ways.items():
        got = torch.cat([p.grad.reshape(-1) for p in way.network.parameters()])  # type: ignore[union-attr]
        tolerance = 2e-2 if label.endswith("bf16") else 1e-4
        if label != "alone" and not (got - wanted).abs().max() <= tolerance * wanted.abs().max():  # NaN is none
            raise AssertionError(f"{label}: gradients differ from those of DDP on gloo")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=positive_int, nargs="+", default=[2, 4], help="numbers of ranks (default 2 4)")
    args = flags.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ["tiny"] if args.quick else [name for name in NETWORKS if name != "tiny"]:
        for ranks in args.ranks[:1] if args.quick else args.ranks:
            per_rank = run_ranks(measure_all, ranks, name, 3 if args.quick else args.repeat)
            alone = slowest([seconds["alone"] for seconds, _ in per_rank])
            for way in WAYS:
                taken = slowest([seconds[way] for seconds, _ in per_rank])
                row: dict[str, Any] = {"network": name, "ranks": ranks, "way": way, "backward_s": Spread.of(taken)}
                row["added_s"] = Spread.of([a - b for a, b in zip(taken, alone, strict=True)])
                observed = [statistics[way] for _, statistics in per_rank if way in statistics]
                if observed:
                    row |= observed[0] | {"hidden": min(each["hidden"] for each in observed)}
                rows.append(row)

    def observed_text(key: str, show: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
        return lambda row: show(row[key]) if key in row else ""

    report(
        "gradients",
        rows,
        {
            "network": lambda row: row["network"],
            "ranks": lambda row: str(row["ranks"]),
            "way": lambda row: row["way"],
            "backward, ms": lambda row: row["backward_s"].text(1e3),
            "added, ms": lambda row: row["added_s"].text(1e3),
            "buckets": observed_text("buckets", lambda value: f"{value:.0f}"),
            "MiB": observed_text("bytes", lambda value: f"{value / 2**20:,.1f}"),
            "communication, ms": observed_text("communication_s", lambda value: f"{value * 1e3:,.1f}"),
            "hidden": observed_text("hidden", lambda value: f"{value:.0%}"),
        },
        args.out,
    )


if __name__ == "__main__":
    main()
