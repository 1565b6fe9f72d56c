"""Halos between two neighbours: torchtp's pull of just the missing rows : gloo's batch_isend_irecv of as many bytes.

    python -m benchmarks.exchange

Both ranks send and receive. torchtp packs rows out of a tensor and unpacks them into one; gloo moves buffers that are
packed already. Beside it the same pull into a tensor extended by the halo, which copies the own rows too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Spread, measure, parser, report, run_ranks, slowest

# (outer, extent of both ranks together, inner): a cut dim with much, little and nothing behind it, in fp32.
TENSORS = {
    "H of 4 x 32 x 64": (4, 32, 64),
    "H of 16 x 128 x 256": (16, 128, 256),
    "W of 16 x 128 x 256": (16 * 128, 256, 1),
    "H of 64 x 512 x 512": (64, 512, 512),
    "W of 64 x 512 x 512": (64 * 512, 512, 1),
}
SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]


def measure_all(names: list[str], sizes: list[int], repeat: int, inner: int) -> list[dict[str, Any]]:
    """Seconds of every transport for every tensor and size, on this rank."""
    rank = dist.get_rank()
    gloo = dist.new_group(backend="gloo")
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ops = torch.ops.torchtp
    results = []
    for name in names:
        outer, extent, width = TENSORS[name]
        half = extent // 2
        own = torch.randn(outer, half, width)
        for size in sizes:
            rows = size // (outer * width * 4)
            if not 0 < rows <= half:
                continue
            missing = ([half, half - rows], [half + rows, half])
            extended = ([0, half - rows], [half + rows, extent])

            def pull(wanted: tuple[list[int], list[int]] = missing, own: torch.Tensor = own) -> torch.Tensor:
                pulled, ticket = ops.pull_start(own, 1, 2 * own.size(1), *wanted, group)
                ops.pull_finish(pulled, ticket, group)
                return pulled

            outgoing = torch.randn(rows * outer * width)
            incoming = torch.empty_like(outgoing)

            def swap(outgoing: torch.Tensor = outgoing, incoming: torch.Tensor = incoming) -> None:
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, outgoing, 1 - rank, gloo),
                        dist.P2POp(dist.irecv, incoming, 1 - rank, gloo),
                    ]
                )
                for work in works:
                    work.wait()

            got = pull()
            theirs = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(theirs, own)
            wanted = theirs[1][:, :rows] if rank == 0 else theirs[0][:, half - rows :]
            if not got.equal(wanted):
                raise AssertionError(f"wrong halo for {name}, {size} bytes")
            seconds: dict[str, Any] = {}
            for what, run in (
                ("torchtp", pull),
                ("extended", functools.partial(pull, extended)),
                ("gloo", swap),
            ):
                dist.barrier()
                seconds[what] = measure(run, repeat, inner=inner)
            results.append({"tensor": name, "rows": rows, "bytes": rows * outer * width * 4} | seconds)
    return results


def main() -> None:
    args = parser(__doc__).parse_args()
    names = list(TENSORS)[:1] if args.quick else list(TENSORS)
    sizes = SIZES[:2] if args.quick else SIZES
    repeat, inner = (3, 3) if args.quick else (args.repeat, 20)
    rows = []
    for per_rank in zip(*run_ranks(measure_all, 2, names, sizes, repeat, inner), strict=True):
        row = {key: per_rank[0][key] for key in ("tensor", "rows", "bytes")}
        seconds = {what: slowest([result[what] for result in per_rank]) for what in ("torchtp", "extended", "gloo")}
        row |= {f"{what}_s": Spread.of(values) for what, values in seconds.items()}
        row["gloo_over_torchtp"] = Spread.of([a / b for a, b in zip(seconds["gloo"], seconds["torchtp"], strict=True)])
        rows.append(row)
    report(
        "exchange",
        rows,
        {
            "cut dim": lambda row: row["tensor"],
            "rows": lambda row: str(row["rows"]),
            "KiB": lambda row: f"{row['bytes'] / 1024:,.0f}",
            "torchtp, us": lambda row: row["torchtp_s"].text(1e6),
            "into extended, us": lambda row: row["extended_s"].text(1e6),
            "gloo, us": lambda row: row["gloo_s"].text(1e6),
            "gloo : torchtp": lambda row: row["gloo_over_torchtp"].text(),
        },
        args.out,
    )


if __name__ == "__main__":
    main()
