"""Ranks of the real backend are killed, stopped and slowed at random moments; `make chaos` does so longer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.timeout(600)
def test_chaos():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, FOLDER / "chaos.py", "20"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
