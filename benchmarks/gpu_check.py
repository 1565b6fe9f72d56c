"""All that a card has to tell about torchtp, in one command of less than 9 minutes.

    python -m benchmarks.gpu_check --out benchmarks/results/<card>
    python -m benchmarks.gpu_check --out /tmp/check --dry-run       # tiny shapes on the CPU, to try the program itself

Where the CUDA build is not there it is made first, which costs minutes (docs/cuda.md plans for that). Each part runs in a process of its own with a time limit of
its own; what fails, crashes or hangs is told and the rest goes on. The files are written anew after every part:
results.json (all rows, versions, card, date), results.md (the page made of them) and log.txt (what the parts printed).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import guard, page
from benchmarks.gpu.part import DEVICE_LOST, read

ROOT = Path(__file__).parents[1]
TOTAL_SECONDS = 535.0
_END_SECONDS = 5.0  # kept back for the last writing
_LEAST_SECONDS = 15.0  # a part is not started again for less


@dataclass(frozen=True)
class Piece:
    """A part, what it may take, and what it is started with."""

    name: str
    limit: float
    module: str
    arguments: tuple[str, ...] = ()


# By value: what comes last is what is cut when time runs out, and is run by itself afterwards (docs/cuda.md).
PIECES = (
    Piece("ceilings", 45, "benchmarks.gpu.ceilings"),
    Piece("kernel checks", 70, "benchmarks.gpu.kernel_checks"),
    Piece("tests", 100, "benchmarks.gpu.tests"),
    Piece("ranks", 90, "benchmarks.gpu.ranks"),
    Piece("kernel times", 135, "benchmarks.gpu.kernel_times"),
    Piece("article", 120, "benchmarks.gpu.article"),
    Piece("article, compiled", 130, "benchmarks.gpu.article", ("--compiled",)),
    Piece("sanitizer", 200, "benchmarks.gpu.sanitizer"),
    Piece("exchange tests", 340, "benchmarks.gpu.tests", ("--kind", "exchanges")),
    Piece("networks", 300, "benchmarks.gpu.networks"),
    Piece("rule tests", 500, "benchmarks.gpu.tests", ("--kind", "rules")),
)


_READY = "import torchtp; from torchtp import _extension as e; assert {dry} or e.built_for(e.find()).cuda"
_BUILD = ("setup.py", "-q", "build_ext", "--inplace")
_BUILD_SECONDS = 300.0


def build_if_needed(log: Path, limit: float, dry: bool) -> dict[str, Any] | None:
    """The part that builds the extension, if it does not load or knows no CUDA."""
    if guard.run([sys.executable, "-c", _READY.format(dry=dry)], log, 60).status == 0:
        return None
    environment = {"MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))}
    ending = guard.run([sys.executable, *_BUILD], log, min(limit, _BUILD_SECONDS), environment)
    row: dict[str, Any] = {"case": "build", "seconds": round(ending.seconds)}
    if ending.status != 0:
        row["error"] = f"the build {ending.text()}; see the log"
    return {"name": "build", "ending": ending.text(), "rows": [row]}


def run_piece(piece: Piece, folder: Path, log: Path, limit: float, dry: bool) -> dict[str, Any]:
    """The rows of one part and how it ended; started again behind a case that took the process with it."""
    rows = folder / f"{piece.name.replace(' ', '_').replace(',', '')}.jsonl"
    ends = time.monotonic() + limit
    starts = 0
    # On the CPU threads wait for each other at every group of a convolution: seconds where other programs run, too.
    environment = {"OMP_NUM_THREADS": "1"} if dry else None
    while True:
        known = len(read(rows))
        starts += 1
        left = ends - time.monotonic()
        command = [sys.executable, "-u", "-m", piece.module, "--rows", str(rows), "--seconds", f"{left - 3:.0f}"]
        command += [*piece.arguments, *(["--dry-run"] if dry else [])]
        ending = guard.run(command, log, left, environment)
        again = ending.status != 0 and not ending.timed_out and len(read(rows)) > known
        if not again or ends - time.monotonic() < _LEAST_SECONDS:
            break
    found = read(rows)
    for row in found:
        if row.pop("begun", False):
            row["error"] = f"took its process with it: {_reason(ending, starts)}"
    return {"name": piece.name, "ending": ending.text(), "starts": starts, "rows": found}


def _reason(ending: guard.Ending, starts: int) -> str:
    if starts > 1:
        return "a crash, a fault of the device or a hang; see the log"
    return "the device was lost" if ending.status == DEVICE_LOST else ending.text()


def main(arguments: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--out", type=Path, required=True, help="the folder for results.json, results.md and log.txt")
    flags.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, to try the program itself")
    flags.add_argument("--only", nargs="*", choices=[piece.name for piece in PIECES], help="these parts only")
    flags.add_argument("--add", action="store_true", help="to what a run of the same commit left in DIR of other parts")
    flags.add_argument("--commit", help="what the tree is called, where git can't tell or is behind")
    flags.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help=f"for all (default {TOTAL_SECONDS:.0f})")
    args = flags.parse_args(arguments)
    began = time.monotonic()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "log.txt"
    results: dict[str, Any] = {
        "about": {"date": datetime.date.today().isoformat(), "dry_run": args.dry_run, **versions(args.commit)},
        "parts": [],
    }
    if args.add:
        try:
            again = [piece.name for piece in PIECES] if args.only is None else args.only
            results = earlier(args.out / "results.json", results["about"], again)
        except (OSError, ValueError) as error:
            flags.error(str(error))
        began -= results["about"]["seconds"]
        args.seconds += results["about"]["seconds"]
    else:
        log.write_text("")
    os.chdir(ROOT)
    built = build_if_needed(log, args.seconds - _END_SECONDS, args.dry_run)
    if built is not None:
        results["parts"].append(built)
        print(page.short(built), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for piece in PIECES:
            if args.only is not None and piece.name not in args.only:
                continue
            left = args.seconds - (time.monotonic() - began) - _END_SECONDS
            if left < 10:
                results["parts"].append({"name": piece.name, "ending": "not begun: no time left", "rows": []})
            else:
                print(f"== {piece.name} ({time.monotonic() - began:.0f} s in)", flush=True)
                part = run_piece(piece, Path(folder), log, min(piece.limit, left), args.dry_run)
                results["parts"].append(part)
                print(page.short(part), flush=True)
            write(results, args.out, time.monotonic() - began)
    write(results, args.out, time.monotonic() - began)
    log.write_text(without_places(log.read_text(errors="replace"), args.out))
    print(f"\n{args.out}/results.md after {time.monotonic() - began:.0f} s\n")
    print(page.targets_text(results))
    return 0 if page.all_well(results) else 1


def earlier(path: Path, about: dict[str, Any], again: Sequence[str]) -> dict[str, Any]:
    """What a run left, less the parts that are run again; ValueError if it was of something else."""
    found: dict[str, Any] = json.loads(path.read_text())
    for name in ("commit", "torch", "python", "dry_run"):
        if found["about"][name] != about[name]:
            raise ValueError(f"--add: {path} is of {name} {found['about'][name]}, and this run of {about[name]}")
    found["parts"] = [part for part in found["parts"] if part["name"] not in again]
    return found


def versions(commit: str | None) -> dict[str, Any]:
    """Of what is measured; read without loading the extension, which a crash could take along."""
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    described = guard.output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    return {
        "python": sys.version.split()[0],
        "torch": of("torch"),
        "triton": of("triton"),
        "commit": commit or described or "unknown",
        "command": "python -m benchmarks.gpu_check",
    }


def write(results: dict[str, Any], out: Path, seconds: float) -> None:
    results["about"]["seconds"] = round(seconds)
    (out / "results.json").write_text(without_places(json.dumps(results, indent=1), out) + "\n")
    (out / "results.md").write_text(without_places(page.text(results), out))


def without_places(text: str, out: Path) -> str:
    """A text that says nothing of where on the machine things lie: results are kept, machines are not."""
    places = {
        f"{ROOT}/": "",
        str(ROOT): "CHECKOUT",
        str(out): "DIR",
        sysconfig.get_path("stdlib"): "PYTHON",
        sys.prefix: "PYTHON",
    }
    places |= {f"{tempfile.gettempdir()}/": "TMP/"}
    for place, name in places.items():
        text = text.replace(place, name)
    return text


if __name__ == "__main__":
    sys.exit(main())
