"""One training step on 1 rank : the same step on 2 ranks : the same with an exchange that does nothing (the bound).

Beside them what the machine gives without torchtp: every rank trains the plain network on a part of the image by itself.

    python -m benchmarks.train_step

The network of examples/train_disparity.py and ConvNeXt-T at 512 x 1024, fp32, one thread a rank. The three are timed in
turn in the same processes; while one rank works alone the other sleeps. All keep freed memory
(`torchtp.host_memory.keep_freed_memory`), unless --system-malloc is given.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import torchtp
from benchmarks.common import Spread, parser, report, run_ranks, slowest
from torchtp import _C
from torchtp.flags import positive_int
from torchtp.host_memory import keep_freed_memory

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from networks import Classifier, ConvNeXt, DisparityNet

WORKLOADS = {
    "disparity 500 x 741": (lambda: DisparityNet([1, 1, 2], [16, 32, 64], 0.0), (1, 6, 500, 741)),
    "ConvNeXt-T 512 x 1024": (
        lambda: Classifier(ConvNeXt([3, 3, 9, 3], [96, 192, 384, 768], 3, 0.0), 768),
        (1, 3, 512, 1024),
    ),
    "tiny": (lambda: DisparityNet([1, 1], [8, 16], 0.0), (1, 6, 64, 96)),
}


class Step:
    """A training step: forward, mean squared output as loss, backward, SGD."""

    def __init__(self, network: nn.Module, images: Tensor):
        self.network, self.images = network, images
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)

    def __call__(self) -> None:
        output = self.network(self.images)
        loss = F.mse_loss(output, torch.zeros_like(output))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def measure_workload(name: str, repeat: int, keep: bool) -> dict[str, list[float]]:
    """Seconds a step on this rank, for each way of running it."""
    if keep:
        keep_freed_memory()
    make, shape = WORKLOADS[name]
    torch.manual_seed(0)
    images = torch.randn(shape)
    single = Step(make(), images)
    layout = torchtp.Layout(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("w",)), spatial={"w": -1})
    sharded = Step(torchtp.parallelize(make(), layout), images)
    part = Step(make(), layout.shard(images).to_local().clone())
    group = layout.spatial_mesh.get_group(0).group_name
    seconds: dict[str, list[float]] = {"one": [], "sharded": [], "bound": [], "part": []}

    def timed(step: Step) -> float:
        dist.barrier()
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    for turn in range(repeat + 1):
        alone = timed(single) if dist.get_rank() == 0 else dist.barrier() or 0.0
        both = timed(sharded)
        _C.set_exchange(group, "none")
        bound = timed(sharded)
        _C.set_exchange(group, "auto")
        apart = timed(part)
        if turn > 0:
            for key, value in (("one", alone), ("sharded", both), ("bound", bound), ("part", apart)):
                seconds[key].append(value)
    return seconds


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=positive_int, default=2, help="number of ranks (default 2)")
    flags.add_argument("--system-malloc", action="store_true", help="give freed memory back to the system, as usual")
    args = flags.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ["tiny"] if args.quick else [name for name in WORKLOADS if name != "tiny"]:
        per_rank = run_ranks(
            measure_workload, args.ranks, name, 3 if args.quick else args.repeat, not args.system_malloc
        )
        one, sharded, bound, part = (
            slowest([result[key] for result in per_rank]) for key in ("one", "sharded", "bound", "part")
        )
        rows.append(
            {
                "workload": name,
                "ranks": args.ranks,
                "one_rank_s": Spread.of(one),
                "sharded_s": Spread.of(sharded),
                "nothing_exchanged_s": Spread.of(bound),
                "parts_alone_s": Spread.of(part),
                "speedup": Spread.of([a / b for a, b in zip(one, sharded, strict=True)]),
                "machine_speedup": Spread.of([a / b for a, b in zip(one, part, strict=True)]),
                "over_bound": Spread.of([a / b for a, b in zip(sharded, bound, strict=True)]),
            }
        )
    report(
        "train_step",
        rows,
        {
            "network": lambda row: row["workload"],
            "1 rank, ms": lambda row: row["one_rank_s"].text(1e3),
            f"{args.ranks} ranks, ms": lambda row: row["sharded_s"].text(1e3),
            "exchange does nothing, ms": lambda row: row["nothing_exchanged_s"].text(1e3),
            "plain parts, ms": lambda row: row["parts_alone_s"].text(1e3),
            "1 rank : parts": lambda row: row["machine_speedup"].text(digits=2),
            "1 rank : sharded": lambda row: row["speedup"].text(digits=2),
            "sharded : bound": lambda row: row["over_bound"].text(digits=3),
        },
        args.out,
        {"freed memory": "given back" if args.system_malloc else "kept"},
    )


if __name__ == "__main__":
    main()
