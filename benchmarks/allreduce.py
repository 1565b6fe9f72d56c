"""An allreduce of fp32 sums: torchtp with the buffer anywhere and in the shared segment : gloo, in the same processes.

    python -m benchmarks.allreduce

Synchronous calls as a training loop makes them (`dist.all_reduce`). One repetition measures all three one after the
other, so that a busy machine disturbs them alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Spread, measure, parser, report, run_ranks, slowest

SIZES = [1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20]
RANKS = (2, 4)
KINDS = ("torchtp", "segment", "gloo")


def measure_all(sizes: list[int], repeat: int) -> list[dict[str, list[float]]]:
    """Seconds of each kind for each size, on this rank."""
    gloo = dist.new_group(backend="gloo")
    own = dist.group.WORLD
    backend = own._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    results = []
    for size in sizes:
        numel = size // 4
        segment = backend.allocate_tensor(numel, dtype=torch.float32, device=torch.device("cpu"))
        tensors = {"torchtp": torch.empty(numel), "segment": segment, "gloo": torch.empty(numel)}
        groups = {"torchtp": own, "segment": own, "gloo": gloo}
        for kind, tensor in tensors.items():
            tensor.fill_(dist.get_rank() + 1)
            dist.all_reduce(tensor, group=groups[kind])
            if not (tensor == dist.get_world_size() * (dist.get_world_size() + 1) / 2).all():
                raise AssertionError(f"wrong sum of {size} bytes by {kind}")
            tensor.zero_()
        inner = max(1, min(50, (1 << 20) // size))
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(repeat):
            for kind in KINDS:
                dist.barrier()
                tensor, group = tensors[kind], groups[kind]
                seconds[kind] += measure(lambda t=tensor, g=group: dist.all_reduce(t, group=g), 1, 1, inner)  # type: ignore[misc]
        results.append(seconds)
    return results


def main() -> None:
    args = parser(__doc__).parse_args()
    sizes = SIZES[:3] if args.quick else SIZES
    repeat = 3 if args.quick else args.repeat
    rows = []
    for ranks in RANKS:
        for size, per_rank in zip(sizes, zip(*run_ranks(measure_all, ranks, sizes, repeat), strict=True), strict=True):
            seconds = {kind: slowest([result[kind] for result in per_rank]) for kind in KINDS}
            row: dict[str, Any] = {"ranks": ranks, "bytes": size}
            row |= {f"{kind}_s": Spread.of(values) for kind, values in seconds.items()}
            for kind in ("torchtp", "segment"):
                ratios = [a / b for a, b in zip(seconds["gloo"], seconds[kind], strict=True)]
                row[f"gloo_over_{kind}"] = Spread.of(ratios)
            rows.append(row)
    report(
        "allreduce",
        rows,
        {
            "ranks": lambda row: str(row["ranks"]),
            "KiB": lambda row: f"{row['bytes'] / 1024:,.0f}",
            "torchtp, us": lambda row: row["torchtp_s"].text(1e6),
            "in the segment, us": lambda row: row["segment_s"].text(1e6),
            "gloo, us": lambda row: row["gloo_s"].text(1e6),
            "gloo : torchtp": lambda row: row["gloo_over_torchtp"].text(),
            "gloo : segment": lambda row: row["gloo_over_segment"].text(),
        },
        args.out,
    )


if __name__ == "__main__":
    main()
