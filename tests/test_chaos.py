"""Ranks of the real backend are killed, stopped and slowed at random moments; `make chaos` does so longer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtp.testing.namespaces import why_not

FOLDER = Path(__file__).parent


def _run(*arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, FOLDER / "chaos.py", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_chaos():
    _run("20")


@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
def test_chaos_over_hosts():
    _run("--hosts", "12")
