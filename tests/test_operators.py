"""Every operator of PyTorch's own database, on cut tensors: values and gradients of one device, by the same steps on all ranks."""

from __future__ import annotations

import math

import pytest
import torch
from operators import compare, complaints

from torchtp.testing import run_ranks

H3 = {"h": 3}
W2 = {"w": 2}
HW = {"h": 2, "w": 2}
_PARTS = 4


def assert_alike(axes, most, part, twice=False, dtype=torch.float64, timeout=300):
    found = run_ranks(
        compare, math.prod(axes.values()), axes, most, (part, _PARTS), twice, dtype, backend="torchtp", timeout=timeout
    )
    assert len(found[0]) > 100
    assert not complaints(found)


@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize(("axes", "most"), [(H3, 2), (HW, 1)], ids=["h3", "h2_w2"])
def test_operators_of_pytorch(axes, most, part):
    assert_alike(axes, most, part)


@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("dtype", [torch.complex128, torch.int64], ids=str)
def test_operators_of_pytorch_on_other_numbers(dtype, part):
    assert_alike(HW, 1, part, dtype=dtype)


@pytest.mark.long
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("axes", [H3, W2, HW], ids=["h3", "w2", "h2_w2"])
def test_operators_of_pytorch_with_all_samples(axes, part, twice):
    assert_alike(axes, 1000, part, twice, timeout=1500)


@pytest.mark.long
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("dtype", [torch.complex128, torch.int64, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("axes", [H3, W2, HW], ids=["h3", "w2", "h2_w2"])
def test_operators_of_pytorch_on_other_numbers_with_all_samples(axes, dtype, part):
    assert_alike(axes, 1000, part, dtype=dtype, timeout=1500)
