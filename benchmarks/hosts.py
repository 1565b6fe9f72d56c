"""An allreduce of fp32 sums over several hosts by torchtp and by gloo, turn and turn about in the same processes.

    python -m benchmarks.hosts

Hosts are network namespaces of this machine, joined by a bridge: what goes between them is copied by the kernel, and all
ranks share its cores. So the figures tell how much is sent and how much work that is, not how fast a network is.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Spread, parser, report, slowest
from torchtp.testing.namespaces import Hosts

SIZES = [1 << 10, 64 << 10, 1 << 20, 25 << 20]
PLACES = ((2, 2), (3, 1), (1, 1, 1, 1))


def _seconds(num_bytes: int, repeat: int, inner: int) -> dict[str, list[float]]:
    groups = {"torchtp": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    tensor = torch.empty(num_bytes // 4)
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(repeat + 2):
        for name, group in groups.items():
            tensor.fill_(rank + 1)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                dist.all_reduce(tensor, group=group)
            took = (time.perf_counter() - start) / inner
            if turn < 2:
                continue  # warming up
            seconds[name].append(took)
            if inner == 1 and not (tensor == size * (size + 1) / 2).all():
                raise AssertionError(f"{name} gave a wrong sum")
    dist.destroy_process_group(groups["gloo"])
    return seconds


def main() -> None:
    """Measure, print the table, write the result file."""
    options = parser(__doc__).parse_args()
    repeat = 3 if options.quick else options.repeat
    rows: list[dict[str, Any]] = []
    for places in PLACES[:1] if options.quick else PLACES:
        with contextlib.closing(Hosts(places)) as team:
            for num_bytes in SIZES[-1:] if options.quick else SIZES:
                inner = max(1, min(20, (1 << 20) // num_bytes))
                per_rank = team.run(_seconds, num_bytes, repeat, inner, timeout=600)
                seconds = {name: slowest([each[name] for each in per_rank]) for name in ("torchtp", "gloo")}
                row: dict[str, Any] = {"hosts": " + ".join(map(str, places)), "bytes": num_bytes}
                row |= {f"{name}_s": Spread.of(values) for name, values in seconds.items()}
                pairs = zip(seconds["gloo"], seconds["torchtp"], strict=True)
                rows.append(row | {"gloo_over_torchtp": Spread.of([gloo / own for gloo, own in pairs])})
    columns = {
        "hosts": lambda row: row["hosts"],
        "KiB": lambda row: f"{row['bytes'] / 1024:,.0f}",
        "torchtp, us": lambda row: row["torchtp_s"].text(1e6),
        "gloo": lambda row: row["gloo_s"].text(1e6),
        "gloo : torchtp": lambda row: row["gloo_over_torchtp"].text(1.0, 2),
    }
    report("hosts", rows, columns, options.out)


if __name__ == "__main__":
    from benchmarks import hosts  # workers import what they run by its name

    hosts.main()
