"""The figures of the README, from the result files beside this program.

python -m benchmarks.summary            # print them
python -m benchmarks.summary --write    # and put them into README.md, between its two marks
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures: python -m benchmarks.summary --write -->\n", "<!-- end of figures -->\n"
BENCHMARKS = (
    "train_step",
    "memory",
    "exchange",
    "allreduce",
    "collectives",
    "hosts",
    "gradients",
    "dispatch",
    "filter_gradients",
)


def read(name: str) -> dict[str, Any]:
    """What `python -m benchmarks.<name>` last wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def _between(ratios: list[float]) -> str:
    low, high = min(ratios), max(ratios)
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"


def _figures() -> Iterator[tuple[str, str]]:
    for row in read("train_step")["rows"]:
        yield (
            f"a training step, {row['workload']}: 1 rank : {row['ranks']} ranks",
            f"{row['speedup']['median']:.2f} times as fast; plain networks on parts, side by side: {row['machine_speedup']['median']:.2f}",
        )
    memory = read("memory")["rows"]
    for ranks in sorted({row["ranks"] for row in memory}):
        shares = [row["bytes"] / row["single_bytes"] for row in memory if row["ranks"] == ranks]
        yield f"bytes kept for backward, fullest of {ranks} ranks : one device", _between(shares)
    exchange = read("exchange")["rows"]
    for label, fits in (("up to 64 KiB", lambda n: n <= 64 << 10), ("1 MiB", lambda n: n == 1 << 20)):
        ratios = [row["gloo_over_torchtp"]["median"] for row in exchange if fits(row["bytes"])]
        yield f"halos, {label}: gloo : torchtp", _between(ratios)
    for row in read("allreduce")["rows"]:
        if row["bytes"] in (8 << 10, 1 << 20, 25 << 20):
            size = _size(row["bytes"])
            yield (
                f"allreduce of {size}, {row['ranks']} ranks: gloo : torchtp",
                f"{row['gloo_over_torchtp']['median']:.3g}, in shared memory {row['gloo_over_segment']['median']:.3g}",
            )
            if "mpi_over_native" in row:
                yield (
                    f"allreduce of {size}, {row['ranks']} ranks, from C++: Open MPI : torchtp",
                    f"{row['mpi_over_native']['median']:.3g}, in shared memory {row['mpi_over_native_segment']['median']:.3g}",
                )
    if (RESULTS / "collectives.json").exists():
        rows = read("collectives")["rows"]
        for op in dict.fromkeys(row["op"] for row in rows):
            ratios = [row["gloo_over_torchtp"]["median"] for row in rows if row["op"] == op]
            yield f"{op}, 1 KiB to 25 MiB, 2 and 4 ranks: gloo : torchtp", _between(ratios)
    for row in read("hosts")["rows"]:
        if row["bytes"] in (64 << 10, 25 << 20):
            size = _size(row["bytes"])
            yield (
                f"allreduce of {size}, hosts of {row['hosts']} ranks: gloo : torchtp",
                f"{row['gloo_over_torchtp']['median']:.3g}",
            )
    for row in read("gradients")["rows"]:
        if row["way"] == "torchtp":
            yield (
                f"gradient allreduce hidden behind backward, {row['network']}, {row['ranks']} ranks",
                f"{row['hidden']:.0%}",
            )
    if (RESULTS / "filter_gradients.json").exists():
        rows = read("filter_gradients")["rows"]
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            ratios = [row["ratio"]["median"] for row in rows if row["dtype"] == dtype and row["kernel"] >= 5]
            yield f"gradient of depthwise filters, 5 x 5 to 31 x 31, {dtype}, CPU: PyTorch : torchtp", _between(ratios)
    added = [row["added_forward_s"]["median"] for row in read("dispatch")["rows"]]
    both = [row["added_both_s"]["median"] for row in read("dispatch")["rows"]]
    yield (
        "added to a tiny op by cutting it, us: forward; forward and backward",
        (f"{_between([1e6 * s for s in added])}; {_between([1e6 * s for s in both])}"),
    )


def _machines() -> Iterator[str]:
    """A sentence for each machine and day, with the benchmarks that ran there if there are several."""
    ran: dict[str, list[str]] = {}
    for name in BENCHMARKS:
        if (RESULTS / f"{name}.json").exists():
            where = read(name)["machine"]
            line = f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, {where['date']}"
            ran.setdefault(line, []).append(name)
    for line, names in ran.items():
        yield f"{line}." if len(ran) == 1 else f"{', '.join(names)}: {line}."


def text() -> str:
    """The table and where it was measured, as Markdown."""
    lines = ["| measured | |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in _figures())]
    lines += [
        "",
        "Medians; both sides of every ratio side by side in one run. "
        + " ".join(_machines())
        + " Programs in `benchmarks/`, results in `benchmarks/results/`.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--write", action="store_true", help="put them into README.md")
    args = flags.parse_args()
    print(text(), end="")
    if args.write:
        head, _, rest = README.read_text().partition(BEGIN)
        _, _, tail = rest.partition(END)
        README.write_text(f"{head}{BEGIN}{text()}{END}{tail}")


if __name__ == "__main__":
    main()
