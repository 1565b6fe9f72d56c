"""docs/performance.md, and the page of a run, from what gpu_check found.

python -m benchmarks.gpu.page            # print it
python -m benchmarks.gpu.page --write    # and put it into docs/performance.md
python -m benchmarks.gpu.page --fill EARLIER "article, compiled" sanitizer < NEWER > benchmarks/results/<card>/results.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.targets import ceiling, outcomes, rows_of

RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
Row = dict[str, Any]


def short(part: dict[str, Any]) -> str:
    """One line of a part, for who is waiting."""
    rows = part["rows"]
    wrong = [row for row in rows if "error" in row]
    skipped = [row for row in rows if "skipped" in row]
    line = f"   {part['name']}: {part['ending']}; {len(rows)} cases, {len(wrong)} failed, {len(skipped)} skipped"
    return "\n".join([line, *(f"      {row['case']}: {row['error'][:160]}" for row in wrong[:12])])


def filled(results: dict[str, Any], earlier: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """`results` with parts that it did not end taken from an earlier run, each marked with the commit and date it is of."""
    about = earlier["about"]
    kept = [{**part, "of": f"{about['commit']}, {about['date']}"} for part in earlier["parts"] if part["name"] in names]
    missing = set(names) - {part["name"] for part in kept}
    if missing:
        raise ValueError(f"--fill: the earlier run has no part {', '.join(sorted(missing))}")
    return results | {"parts": [part for part in results["parts"] if part["name"] not in names] + kept}


def all_well(results: dict[str, Any]) -> bool:
    return all(
        part["ending"] == "done" and not any("error" in row for row in part["rows"]) for part in results["parts"]
    )


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [list(headings), ["---"] * len(headings), *(list(line) for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def targets_text(results: dict[str, Any]) -> str:
    def bound(target: Any) -> str:
        return f"{'at least' if target.at_least else 'at most'} {target.text(target.bound)}"

    lines = [[o.target.what, bound(o.target), o.measured, o.verdict] for o in outcomes(results)]
    return table(["figure", "to reach", "measured, worst to best", ""], lines)


def text(results: dict[str, Any]) -> str:
    """The page of one run."""
    about, rows = results["about"], rows_of(results)
    card = next((row for row in rows if row["case"] == "card"), {})
    sections = [
        f"{card.get('name', 'no card')}, driver {card.get('driver', '-')}, torch {about['torch']}, cuDNN "
        f"{card.get('cudnn', '-')}, NCCL {card.get('nccl', '-')}, Python {about['python']}, commit {about['commit']}, "
        f"{about['date']}; {about.get('seconds', 0)} s.\n",
        "### Targets\n\n" + targets_text(results),
        "### Parts\n\n" + _parts(results),
        "### Ceilings measured in the run\n\n" + _ceilings(rows),
        *_section("Depthwise convolutions 7x7", _depthwise(rows)),
        *_section("Layer norm over channels", _layer_norm(rows)),
        *_section("Depthwise convolution 7x7 and layer norm", _depthwise_layer_norm(rows)),
        *_section("Halos of dense convolutions, channels last", _dense(rows)),
        *_section("Moving", _moving(rows)),
        *_section("Other ops", _ops(rows)),
        *_section("The article's workload", _article(rows)),
        *_section("Tests of the suite", _tests(rows)),
        *_section("Networks cut over ranks that share the card", _networks(rows)),
        *_section("Largest errors against float64", _errors(rows)),
    ]
    return "\n".join(sections)


def _section(title: str, body: str) -> list[str]:
    return [f"### {title}\n\n{body}"] if body else []


def _parts(results: dict[str, Any]) -> str:
    lines, failures = [], []
    for part in results["parts"]:
        good = sum("error" not in row and "skipped" not in row for row in part["rows"])
        wrong = [row for row in part["rows"] if "error" in row]
        skipped = [row for row in part["rows"] if "skipped" in row]
        ending = f"{part['ending']} (of {part['of']})" if "of" in part else part["ending"]
        lines.append([part["name"], ending, str(good), str(len(wrong)), str(len(skipped))])
        failures += [f"- {part['name']}, {row['case']}: `{_plain(row['error'])}`" for row in wrong]
        failures += [f"- {part['name']}, {row['case']}: not run, {row['skipped']}" for row in skipped]
        failures += [_by_events(part["name"], row) for row in part["rows"] if row.get("by_events")]
    out = table(["part", "how it ended", "good", "failed", "skipped"], lines)
    return out + ("\n" + "\n".join(failures) + "\n" if failures else "")


def _by_events(part: str, row: Row) -> str:
    why = row["by_events"]
    return f"- {part}, {row['case']}: {len(why)} figures have the host's time in them, not captured: `{_plain(why[0])}`"


def _plain(error: str) -> str:
    return " ".join(error.replace("`", "'").replace("|", "/").split())[:300]


def _ceilings(rows: list[Row]) -> str:
    lines = []
    for case, name, unit, scale in (
        ("copy", "bytes_per_s", "TB/s read and written", 1e12),
        ("fma fp32", "flop_per_s", "TFLOP/s", 1e12),
        ("matrix product fp32", "flop_per_s", "TFLOP/s", 1e12),
        ("matrix product tf32", "flop_per_s", "TFLOP/s", 1e12),
        ("matrix product bf16", "flop_per_s", "TFLOP/s", 1e12),
        ("launch", "seconds_a_call", "us in a graph", 1e-6),
    ):
        found = ceiling(rows, case, name)
        if found is not None:
            lines.append([case, f"{found / scale:.3g} {unit}"])
    return table(["ceiling", "measured"], lines)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _depthwise(rows: list[Row]) -> str:
    peak, speed = ceiling(rows, "fma fp32", "flop_per_s"), ceiling(rows, "copy", "bytes_per_s")
    lines = []
    for row in rows:
        if row.get("kind") != "depthwise":
            continue
        for layout, ours in row["ours"].items():
            for name in ("forward", "input", "weight"):
                best = min(row["theirs"], key=lambda other, name=name, row=row: row["theirs"][other][name])  # type: ignore[misc]
                theirs, halos = row["theirs"][best][name], row["with_halos"][layout][name]
                floor = max(row["flop_a_pass"] / peak, row["bytes_a_pass"] / speed) if peak and speed else 0.0
                lines.append([
                    f"stage {row['stage']}, {row['dtype']}, {layout}, {name}", _us(ours[name]), _us(halos),
                    f"{_us(theirs)} ({best})", f"{theirs / ours[name]:.2f}", f"{floor / ours[name]:.0%}",
                ])  # fmt: skip
    headings = [
        "",
        "us",
        "us with halos",
        "PyTorch's best, us",
        "times as fast",
        "of the higher ceiling (FMA, copying)",
    ]
    return table(headings, lines) if lines else ""


def _both_passes(label: str, row: Row, ours: Row, theirs: Row, note: str, speed: float | None) -> list[list[str]]:
    return [
        [
            f"{label}, {name}", _us(ours[name]), f"{_us(theirs[name])}{note}", f"{theirs[name] / ours[name]:.2f}",
            f"{row['bytes'][name] / ours[name] / speed:.0%}" if speed else "", _of_a_copy(row, name, ours[name]),
        ]
        for name in ("forward", "backward")
    ]  # fmt: skip


_HEADINGS = ["", "us", "PyTorch, us", "times as fast", "of copying", "of a copy as large"]


def _of_a_copy(row: Row, name: str, taken: float) -> str:
    return f"{row['copy'][name] / taken:.0%}" if name in row.get("copy", {}) else ""


def _layer_norm(rows: list[Row]) -> str:
    speed = ceiling(rows, "copy", "bytes_per_s")
    lines: list[list[str]] = []
    for row in rows:
        if row.get("kind") == "layer norm":
            for layout, ours in row["ours"].items():
                best = min(row["theirs"], key=lambda other, row=row: sum(row["theirs"][other].values()))  # type: ignore[misc]
                label = f"stage {row['stage']}, {row['dtype']}, {layout}"
                lines += _both_passes(label, row, ours, row["theirs"][best], f" ({best})", speed)
    return table(_HEADINGS, lines) if lines else ""


def _depthwise_layer_norm(rows: list[Row]) -> str:
    peak, speed = ceiling(rows, "fma fp32", "flop_per_s"), ceiling(rows, "copy", "bytes_per_s")
    lines = []
    for row in rows:
        if row.get("kind") != "depthwise layer norm":
            continue
        for name, taken in row["ours"].items():
            one, theirs = row["one_launch"].get(name), row["theirs"][name]
            floor = max(row["flop"][name] / peak, row["bytes"][name] / speed) if peak and speed else 0.0
            lines.append([
                f"stage {row['stage']}, {row['dtype']}, {row['layout']}, {name}", _us(taken), _us(one) if one else "-",
                _us(theirs), f"{theirs / taken:.2f}", f"{floor / taken:.0%}",
            ])  # fmt: skip
    headings = [
        "",
        "us",
        "in one launch, us",
        "PyTorch, us",
        "times as fast",
        "of the higher ceiling (FMA, copying)",
    ]
    return table(headings, lines) if lines else ""


def _dense(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        if row.get("kind") != "dense convolution":
            continue
        for name in ("forward", "backward"):
            laid, border, alone = (row["ways"][way][name] for way in ("laid", "border", "alone"))
            lines.append([f"{row['what']}, {row['dtype']}, {row['bytes'] / 2**20:.0f} MiB, {name}", _us(laid),
                          _us(border), _us(alone), f"{laid / border:.2f}"])  # fmt: skip
    headings = ["", "halos laid beside, us", "border apart, us", "without halos, us", "times as fast apart"]
    return table(headings, lines) if lines else ""


def _ops(rows: list[Row]) -> str:
    speed = ceiling(rows, "copy", "bytes_per_s")
    lines: list[list[str]] = []
    for row in rows:
        if row.get("kind") == "op":
            lines += _both_passes(row["what"], row, row["ours"], row["theirs"], "", speed)
    return table(_HEADINGS, lines) if lines else ""


def _moving(rows: list[Row]) -> str:
    speed = ceiling(rows, "copy", "bytes_per_s")
    lines = []
    for row in rows:
        if row.get("kind") not in ("halo pack", "bucket pack"):
            continue
        for name, taken in row["ours"].items():
            theirs = row["theirs"].get(name, min(row["theirs"].values()))
            share = f"{row['moved'] / taken / speed:.0%}" if speed else ""
            lines.append([f"{row['kind']}, {row['what']}, {row['moved'] / 2**20:.2f} MiB moved, {name}", _us(taken),
                          _us(theirs), f"{theirs / taken:.2f}", share, _of_a_copy(row, name, taken)])  # fmt: skip
    return table(_HEADINGS, lines) if lines else ""


def _article(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        if "variant" in row:
            lines.append([
                f"{row['variant']}{', compiled' if row['compiled'] else ''}", row["precision"],
                f"{row['step_s'] * 1e3:,.0f}", f"{row.get('peak_allocated_GiB', 0):.2f}",
                f"{row.get('peak_reserved_GiB', 0):.2f}", f"{row['first_step_s']:.1f}", f"{row['last_loss']:.5f}",
            ])  # fmt: skip
    headings = ["", "precision", "ms a step", "GiB allocated", "GiB reserved", "first step, s", "loss"]
    return table(headings, lines) if lines else ""


def _tests(rows: list[Row]) -> str:
    lines = [[row["case"], str(row["passed"]), str(row["not_run"])] for row in rows if "passed" in row]
    return table(["file", "passed", "not run"], lines) if lines else ""


def _networks(rows: list[Row]) -> str:
    lines = [
        [row["case"], *(f"{row[name]:.0e}" for name in ("float64", "cut_float32", "float32"))]
        for row in rows
        if "cut_float32" in row
    ]
    head = ["network, mesh", "off by, of one device in float64", "in float32, of float64", "one device in float32"]
    return table(head, lines) if lines else ""


def _errors(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        if "errors" in row:
            worst = max(row["errors"], key=lambda name, row=row: row["errors"][name] / row["bounds"][name])  # type: ignore[misc]
            lines.append([row["case"], worst, f"{row['errors'][worst]:.1e}", f"{row['bounds'][worst]:.1e}"])
    return table(["check", "result", "largest error", "bound"], lines) if lines else ""


def performance() -> str:
    """docs/performance.md: every card that was measured, or what is to be reached where none was."""
    head = [
        "# Performance\n",
        "Made by `python -m benchmarks.gpu.page --write` from `benchmarks/results/<card>/results.json`, which one command on a card\n"
        "writes (`python -m benchmarks.gpu_check`, [cuda.md](cuda.md)). Figures of the CPU stand in the [README](../README.md).\n",
    ]
    runs = sorted(RESULTS.glob("*/results.json"))
    if not runs:
        nothing: dict[str, Any] = {"about": {}, "parts": []}
        head += ["No card has been measured yet. What one H200 is to reach:\n", targets_text(nothing)]
    for path in runs:
        head += [f"## {path.parent.name}\n", text(json.loads(path.read_text()))]
    return "\n".join(head)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--write", action="store_true", help="write docs/performance.md")
    flags.add_argument(
        "--fill", nargs="+", metavar=("EARLIER", "PART"), help="take parts of an earlier run's results.json"
    )
    args = flags.parse_args()
    if args.fill:
        path, *names = args.fill
        print(json.dumps(filled(json.load(sys.stdin), json.loads(Path(path).read_text()), names), indent=1))
        return
    made = performance()
    if args.write:
        PAGE.write_text(made)
    else:
        print(made)


if __name__ == "__main__":
    main()
