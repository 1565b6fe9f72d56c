"""What every part of gpu_check is made of: cases, each guarded, each leaving a row in a file as soon as it is known.

A case that raises leaves its error and the next one goes on. One that takes the process with it (a fault on the device,
a crash, a hang) ends the part; started again on the same file, the part goes on behind the case that did it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DEVICE_LOST = 3  # the exit status of a part whose device answers no more


class Part:
    """The cases of one part; `dry` runs tiny ones on the CPU, to try the program itself."""

    def __init__(self, rows: Path | None, dry: bool, seconds: float):
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self._rows = rows
        self._ends = time.monotonic() + seconds
        self._known = {row["case"] for row in read(rows)} if rows else set()

    @property
    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def case(self, name: str, run: Callable[[], dict[str, Any] | None], seconds: float = 30.0) -> None:
        """Run `run` and keep what it returns, or its error, as the row of that name; at most `seconds`."""
        if name in self._known:
            return
        self._known.add(name)
        if self.seconds_left < 2:
            self._write({"case": name, "skipped": "no time left"})
            return
        self._write({"case": name, "begun": True})
        faulthandler.dump_traceback_later(min(seconds, self.seconds_left + 5), exit=True)
        began = time.monotonic()
        try:
            row = run() or {}
            self.synchronize()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:2000]}
            traceback.print_exc()
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._write({"case": name, **row, "seconds": round(time.monotonic() - began, 3)})
        self._free()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _free(self) -> None:
        gc.collect()
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except Exception as error:
            print(f"the device answers no more: {error}", flush=True)
            os._exit(DEVICE_LOST)
        torch.cuda.empty_cache()

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row)
        if "begun" not in row:
            print(line, flush=True)
        if self._rows:
            with self._rows.open("a") as file:
                file.write(line + "\n")


def read(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a file, each case once: what it left, or that it was begun; a line cut off by a crash is left out."""
    rows: dict[str, dict[str, Any]] = {}
    if path and path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                rows[row["case"]] = row
    return list(rows.values())


def main(
    doc: str | None,
    run: Callable[[Part, argparse.Namespace], None],
    more_flags: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """The command line of a part."""
    flags = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rows", type=Path, help="the file of rows to add to (JSON, one a line)")
    flags.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, to try the program itself")
    flags.add_argument("--seconds", type=float, default=600.0, help="begin no case after so long (default 600)")
    if more_flags:
        more_flags(flags)
    args = flags.parse_args()
    faulthandler.register(signal.SIGUSR1)
    torch.manual_seed(0)
    run(Part(args.rows, args.dry_run, args.seconds), args)


def no_program(doc: str | None, program: str) -> None:
    """The command line of a module that others are made of: what it is, and which program uses it."""
    epilog = f"This is no program of its own: start python -m {program}."
    flags = argparse.ArgumentParser(
        description=doc, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.parse_args()
    flags.error(epilog)


if __name__ == "__main__":
    no_program(__doc__, "benchmarks.gpu_check")
