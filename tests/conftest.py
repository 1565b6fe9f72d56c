import random

import pytest
import torch

from torchtp.testing import poison_empty

torch.set_num_threads(1)
poison_empty()


@pytest.fixture
def seeded():
    """The same random numbers on every run."""
    random.seed(0)
    torch.manual_seed(0)
