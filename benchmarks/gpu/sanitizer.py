"""compute-sanitizer's memcheck and racecheck over the checks of the kernels, on small cases.

python -m benchmarks.gpu.sanitizer
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu import guard
from benchmarks.gpu.part import Part, main, read

_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")


def sanitize(part: Part, tool: str, seconds: float) -> dict[str, Any]:
    """What the tool says of as many cases as fit into the time."""
    found = shutil.which("compute-sanitizer")
    if found is None and not part.dry:
        return {"skipped": "there is no compute-sanitizer"}
    with tempfile.TemporaryDirectory() as folder:
        log, rows = Path(folder) / "log", Path(folder) / "rows"
        # The torch allocator's blocks hide what lies between tensors; without it every tensor is one of the driver's.
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command = [str(found), f"--tool={tool}", "--print-limit=20", "--target-processes=all"] if found else []
        command += [sys.executable, "-m", "benchmarks.gpu.kernel_checks", "--rows", str(rows), "--small"]
        command += ["--seconds", f"{seconds - 12:.0f}", *(["--dry-run"] if part.dry else [])]
        ending = guard.run(command, log, seconds, environment)
        text = log.read_text(errors="replace")
        checked = [row["case"] for row in read(rows) if "errors" in row]
    print(text[-8000:], flush=True)
    summary = _SUMMARY.findall(text)
    row: dict[str, Any] = {"ending": ending.text(), "summary": summary, "checked": checked}
    if any(not said.startswith("0 ") for said in summary):
        row["error"] = f"{tool}: {'; '.join(summary)}"
    elif not summary and not part.dry:
        row["error"] = f"{tool} came to no end: {ending.text()}"
    return row


def run(part: Part, options: argparse.Namespace) -> None:
    for tool in ("memcheck", "racecheck")[: 1 if part.dry else 2]:
        seconds = max(10.0, part.seconds_left / (2 if tool == "memcheck" else 1) - 2)
        part.case(tool, lambda tool=tool, seconds=seconds: sanitize(part, tool, seconds), seconds + 10)  # type: ignore[misc]


if __name__ == "__main__":
    main(__doc__, run)
