import random
import shutil
import subprocess
from pathlib import Path

import pytest
import ranks_device
import torch

from torchtp.testing import poison_empty

torch.set_num_threads(1)
poison_empty()
if ranks_device.ON_CARD:
    ranks_device.use_the_card()


@pytest.fixture
def seeded():
    """The same random numbers on every run."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def preloaded(tmp_path, monkeypatch):
    """A library whose variables break something in the process that has it preloaded, as new ranks have."""
    if not shutil.which("gcc"):
        pytest.skip("needs a C compiler")
    library = tmp_path / "preloaded.so"
    source = Path(__file__).parent / "preloaded.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    return str(library)
