"""What all benchmarks share: ranks, repeated timing, tables and result files with machine, versions and date."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchtp
from torchtp.flags import positive_int

RESULTS = Path(__file__).parent / "results"


@dataclass
class Spread:
    """Median, first and third quartile of repeated measurements, in the unit of the measurements."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        return Spread(*(ordered[round(part * (len(ordered) - 1))] for part in (0.5, 0.25, 0.75)))

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        return f"{self.median * scale:,.{digits}f} ({self.low * scale:,.{digits}f}..{self.high * scale:,.{digits}f})"


def measure(run: Callable[[], Any], repeat: int, warmup: int = 3, inner: int = 1) -> list[float]:
    """Seconds a call of `run`, `repeat` times; each is the mean over `inner` calls. A barrier is the caller's affair."""
    for _ in range(warmup):
        run()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        seconds.append((time.perf_counter() - start) / inner)
    return seconds


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """The i-th measurement of a collective takes as long as on its slowest rank."""
    return [max(values) for values in zip(*per_rank, strict=True)]


def run_ranks(fn: Callable[..., Any], size: int, *args: Any, backend: str = "torchtp", threads: int = 1) -> list[Any]:
    """fn(*args) on `size` fresh processes of one process group; the results by rank. `fn` is a module-level function."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank_main, (fn, size, args, backend, threads, folder), nprocs=size, start_method="spawn")
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(size)]


def _rank_main(
    rank: int, fn: Callable[..., Any], size: int, args: Sequence[Any], backend: str, threads: int, folder: str
) -> None:
    torch.set_num_threads(threads)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(backend, rank=rank, world_size=size, store=store)
    try:
        result = fn(*args)
        (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def commit() -> str:
    """The checkout's commit, marked as dirty where anything but results was changed since: those of the run before."""

    def git(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=here).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)results")
    return git("describe", "--always") + ("-dirty" if changed else "")


def machine() -> dict[str, Any]:
    """Where and with what something was measured."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else platform.machine()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchtp": torchtp.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def parser(description: str | None, *, times: bool = True) -> argparse.ArgumentParser:
    """The flags every benchmark has; one that times nothing has nothing to repeat."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if times:
        made.add_argument("--repeat", type=positive_int, default=20, help="measurements of each figure (default 20)")
    made.add_argument("--quick", action="store_true", help="few sizes and repetitions, to try the program itself")
    made.add_argument(
        "--out", type=_result_file, help="the JSON file to write (default benchmarks/results/<name>.json)"
    )
    return made


def _result_file(text: str) -> Path:
    """Checked before minutes of measuring."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name the JSON file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} can't be written")
    return path


def _flags_that_count() -> list[str]:
    """This program's flags but where the result goes."""
    flags = sys.argv[1:]
    if "--out" in flags:
        at = flags.index("--out")
        del flags[at : at + 2]
    return [flag for flag in flags if not flag.startswith("--out=")]


def report(
    name: str,
    rows: Sequence[dict[str, Any]],
    columns: dict[str, Callable[[dict[str, Any]], str]],
    out: Path | None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Prints `rows` as a table (a column is a heading and how a row shows there) and writes them to a JSON file."""
    where = machine()
    print(f"\n{name}: {where['cpu']}, {where['cores']} cores, torch {where['torch']}, {where['date']}")
    cells = [list(columns)] + [[show(row) for show in columns.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for number, line in enumerate(cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        if number == 0:
            print("  ".join("-" * width for width in widths))
    for key, value in (notes or {}).items():
        print(f"{key}: {value}")
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [{key: asdict(value) if isinstance(value, Spread) else value for key, value in row.items()} for row in rows]
    path.write_text(
        json.dumps(
            {
                "benchmark": name,
                "machine": where,
                "command": " ".join(["python -m", f"benchmarks.{name}", *_flags_that_count()]),
                "notes": notes or {},
                "rows": plain,
            },
            indent=1,
        )
        + "\n"
    )
