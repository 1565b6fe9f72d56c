"""The CUDA part of the test suite, with FAIL_WITHOUT_CUDA=1: a row for each test that failed, and one for all.

python -m benchmarks.gpu.tests
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu import guard
from benchmarks.gpu.part import Part, main
from benchmarks.gpu.ranks import ONE_CARD

ROOT = Path(__file__).parents[2]
_OUTCOME = re.compile(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", re.M)


def files(of_exchanges: bool) -> list[str]:
    """Tests that need a card: those of several ranks, which start many processes, or all others."""
    found = sorted((ROOT / "tests").glob("test_cuda*.py"))
    of_ranks = {"test_cuda_backend.py", "test_cuda_exchange.py"}
    return [str(path.relative_to(ROOT)) for path in found if (path.name in of_ranks) == of_exchanges]


def outcomes(log: str) -> dict[str, list[str]]:
    """Names of tests by how they ended, from what pytest -v printed."""
    by: dict[str, list[str]] = {}
    for name, outcome in _OUTCOME.findall(log):
        by.setdefault(outcome.lower(), []).append(name)
    return by


def run_file(part: Part, file: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--timeout=100", file]
        command += ["-x", "--co"] if part.dry else []
        environment = {} if part.dry else {"FAIL_WITHOUT_CUDA": "1", **ONE_CARD}
        os.chdir(ROOT)
        ending = guard.run(command, log, part.seconds_left, environment)
        text = log.read_text(errors="replace")
    print(text[-12000:], flush=True)
    found = outcomes(text)
    row: dict[str, Any] = {"ending": ending.text(), "passed": len(found.get("passed", []))}
    row |= {key: found[key] for key in ("failed", "error") if key in found}
    row["not_run"] = len(found.get("skipped", []))
    if ending.status != 0 or "failed" in found or "error" in found:
        row["error"] = f"{len(found.get('failed', []) + found.get('error', []))} tests failed; {ending.text()}"
    return row


def run(part: Part, options: argparse.Namespace) -> None:
    for file in files(options.exchange):
        part.case(file, lambda file=file: run_file(part, file), seconds=part.seconds_left)  # type: ignore[misc]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exchange", action="store_true", help="the tests of exchanges between ranks that share the card"
    )


if __name__ == "__main__":
    main(__doc__, run, flags)
