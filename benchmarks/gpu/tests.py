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


def files(kind: str) -> list[str]:
    """Tests that need a card, of one process or of several ranks ("exchanges"), or those of the CPU that can have one ("rules")."""
    folder = ROOT / "tests"
    if kind == "rules":
        first = [folder / f"test_{name}.py" for name in ("random_networks", "models", "models_attention", "routing")]
        found = [*first, *sorted(folder.glob("test_rules_*.py"))]
    else:
        of_ranks = {"test_cuda_backend.py", "test_cuda_exchange.py"}
        found = [
            path for path in sorted(folder.glob("test_cuda*.py")) if (path.name in of_ranks) == (kind == "exchanges")
        ]
    return [str(path.relative_to(ROOT)) for path in found]


def outcomes(log: str) -> dict[str, list[str]]:
    """Names of tests by how they ended, from what pytest -v printed."""
    by: dict[str, list[str]] = {}
    for name, outcome in _OUTCOME.findall(log):
        by.setdefault(outcome.lower(), []).append(name)
    return by


def run_file(part: Part, file: str, kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--timeout=100", file]
        command += ["-x", "--co"] if part.dry else []
        own = {"TORCHTP_TEST_CARD": "1"} if kind == "rules" else {"FAIL_WITHOUT_CUDA": "1"}
        environment = {} if part.dry else {**own, **ONE_CARD}
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
    for file in files(options.kind)[: 1 if part.dry else None]:
        part.case(file, lambda file=file: run_file(part, file, options.kind), seconds=part.seconds_left)  # type: ignore[misc]


def flags(parser: argparse.ArgumentParser) -> None:
    kinds = ("kernels", "exchanges", "rules")
    parser.add_argument("--kind", choices=kinds, default="kernels", help="which tests (default: those of one process)")


if __name__ == "__main__":
    main(__doc__, run, flags)
