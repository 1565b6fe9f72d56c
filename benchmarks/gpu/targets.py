"""What a card is to reach, and what the rows of a run say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.part import no_program

Row = dict[str, Any]
MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """A figure to reach; `at_least`, or else at most, `bound`."""

    what: str
    bound: float
    at_least: bool
    text: Callable[[float], str]
    figures: Callable[[list[Row]], list[float]]

    def reached(self, figure: float) -> bool:
        return figure >= self.bound if self.at_least else figure <= self.bound


@dataclass(frozen=True)
class Outcome:
    """A target and the figures that were found for it, the worst first."""

    target: Target
    figures: list[float]

    @property
    def measured(self) -> str:
        if not self.figures:
            return "not measured"
        worst, best = self.target.text(self.figures[0]), self.target.text(self.figures[-1])
        return worst if worst == best else f"{worst} to {best}"

    @property
    def verdict(self) -> str:
        if not self.figures:
            return ""
        good = sum(self.target.reached(figure) for figure in self.figures)
        if good == len(self.figures):
            return "reached"
        return "missed" if good == 0 else f"reached by {good} of {len(self.figures)}"


def rows_of(results: dict[str, Any]) -> list[Row]:
    """The rows of all parts that hold figures."""
    return [row for part in results["parts"] for row in part["rows"] if "error" not in row and "skipped" not in row]


def ceiling(rows: list[Row], case: str, figure: str) -> float | None:
    return next((row[figure] for row in rows if row["case"] == case and figure in row), None)


def _of(rows: list[Row], kind: str) -> Iterator[Row]:
    return (row for row in rows if row.get("kind") == kind)


def _passes(by_layout: dict[str, Row]) -> float:
    """Forward and both gradients, in the best layout."""
    return min(times["forward"] + times["input"] + times["weight"] for times in by_layout.values())


def _depthwise_speed(rows: list[Row]) -> list[float]:
    return [_passes(row["theirs"]) / _passes(row["ours"]) for row in _of(rows, "depthwise")]


def _depthwise_fma(rows: list[Row]) -> list[float]:
    peak = ceiling(rows, "fma fp32", "flop_per_s")
    if not peak:
        return []
    return [
        3 * row["flop_a_pass"] / _passes(row["ours"]) / peak for row in _of(rows, "depthwise") if row["dtype"] == "bf16"
    ]


def _halos(rows: list[Row]) -> list[float]:
    """Each layout and pass, with halos over without."""
    return [
        row["with_halos"][layout][name] / times[name]
        for row in _of(rows, "depthwise")
        for layout, times in row["ours"].items()
        for name in ("forward", "input", "weight")
    ]


def _layer_norm(rows: list[Row]) -> list[float]:
    speed = ceiling(rows, "copy", "bytes_per_s")
    if not speed:
        return []
    return [
        row["bytes"][name] / taken / speed
        for row in _of(rows, "layer norm")
        for times in row["ours"].values()
        for name, taken in times.items()
    ]


def _moving(kind: str, fits: Callable[[Row], bool]) -> Callable[[list[Row]], list[float]]:
    def figures(rows: list[Row]) -> list[float]:
        speed = ceiling(rows, "copy", "bytes_per_s")
        if not speed:
            return []
        return [row["moved"] / taken / speed for row in _of(rows, kind) if fits(row) for taken in row["ours"].values()]

    return figures


def _small_packs(rows: list[Row]) -> list[float]:
    return [taken for row in _of(rows, "halo pack") if row["bytes"] < 64 << 10 for taken in row["ours"].values()]


def variant(rows: list[Row], name: str, precision: str, compiled: bool) -> Row | None:
    """The article's row of that kind, the variant by its letter."""
    for row in rows:
        if row.get("variant", "").startswith(name) and (row["precision"], row["compiled"]) == (precision, compiled):
            return None if "checkpointed" in row["variant"] else row
    return None


def _article(figure: str, theirs: str, over: bool) -> Callable[[list[Row]], list[float]]:
    """Ours : theirs (or theirs : ours), in each precision; of ours and of stock PyTorch the faster of eager and compiled."""

    def best(rows: list[Row], name: str, precision: str) -> float | None:
        found = [variant(rows, name, precision, compiled) for compiled in (False, True)]
        values = [row[figure] for row in found if row and figure in row]
        return min(values) if values else None

    def figures(rows: list[Row]) -> list[float]:
        found = []
        for precision in ("fp32", "tf32", "bf16"):
            ours, other = best(rows, "(c)", precision), best(rows, theirs, precision)
            if ours and other:
                found.append(other / ours if over else ours / other)
        return found

    return figures


def _times(value: float) -> str:
    return f"{value:.2f} times"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _micros(value: float) -> str:
    return f"{value * 1e6:.1f} us"


TARGETS = (
    Target(
        "depthwise 7x7 forward and backward at ConvNeXt-XL's stages, over PyTorch's best layout",
        5.0, True, _times, _depthwise_speed,
    ),
    Target("the same in bf16, of the FMA peak", 0.5, True, _share, _depthwise_fma),
    Target("the same with halos, over without", 1.03, False, _times, _halos),
    Target("layer norm over C, both passes, of copying", 0.8, True, _share, _layer_norm),
    Target("halo pack from 1 MiB, of copying", 0.8, True, _share, _moving("halo pack", lambda row: row["bytes"] >= MIB)),
    Target("halo pack below 64 KiB", 5e-6, False, _micros, _small_packs),
    Target("bucket packing, of copying", 0.85, True, _share, _moving("bucket pack", lambda row: True)),
    Target("the article's step: memory over the reference", 0.65, False, _times, _article("peak_allocated_GiB", "(a)", False)),
    Target("the article's step: speed over the reference", 1.5, True, _times, _article("step_s", "(a)", True)),
    Target("the article's step: speed over the best stock PyTorch", 1.0, True, _times, _article("step_s", "(b)", True)),
)  # fmt: skip


def outcomes(results: dict[str, Any]) -> list[Outcome]:
    """Every target with what was found; nothing counts where the run was a dry one."""
    rows = [] if results["about"].get("dry_run") else rows_of(results)
    return [Outcome(target, sorted(target.figures(rows), reverse=not target.at_least)) for target in TARGETS]


if __name__ == "__main__":
    no_program(__doc__, "benchmarks.gpu.page")
