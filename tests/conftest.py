import random

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
