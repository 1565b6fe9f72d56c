"""Ops on tensors of a card, or of a device that is the CPU in truth (tests/device), against PyTorch in float64."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import pretended
import pytest
import torch
import torch.nn.functional as F
from fakes import Compared
from torch import Tensor

import torchtp  # noqa: F401

PRETENDED = os.environ.get("TORCHTP_TEST_DEVICE")
if PRETENDED:
    pretended.load(PRETENDED)
DEVICE = pretended.DEVICE if PRETENDED else "cuda"
AVAILABLE = bool(PRETENDED) or torch.cuda.is_available()

runs_on_device = [
    pytest.mark.skipif(not AVAILABLE and not os.environ.get("FAIL_WITHOUT_CUDA"), reason="needs a GPU"),
    pytest.mark.usefixtures("seeded"),
]

OPS = torch.ops.torchtp
NO_CUT: tuple[list[int], list[int], list[str]] = ([], [], [])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
# Of the largest value: a rounding of the result, and sums in float32.
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def random_tensor(*sizes: int, dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    out = torch.randn(sizes, dtype=torch.float64).to(dtype)
    return out.contiguous(memory_format=layout) if len(sizes) == 4 else out


def compare(
    op: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    what: object = None,
    strided: bool = False,
) -> None:
    """Outputs and the gradients of all inputs, and that fake tensors have their strides; `strided`: everything lies in memory anyhow."""
    mine = [x.detach().to(DEVICE) for x in inputs]
    mine = [(any_strides(x) if strided else x).requires_grad_() for x in mine]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    with Compared():
        out = op(*mine)
    expected = reference(*theirs)
    rounding = ROUNDING[inputs[0].dtype]
    assert out.dtype == inputs[0].dtype and out.shape == expected.shape, what
    close(out, expected, rounding, (what, "output"))
    if not expected.numel():
        return
    dy = random_tensor(*expected.shape, dtype=inputs[0].dtype)
    dy = dy.contiguous(memory_format=torch.channels_last) if random.random() < 0.5 and dy.dim() == 4 else dy
    gradient = any_strides(dy.to(DEVICE)) if strided else dy.to(DEVICE)
    with Compared():
        found = torch.autograd.grad(out, mine, gradient)
    grads = torch.autograd.grad(expected, theirs, dy.double())
    for i, (a, b) in enumerate(zip(found, grads, strict=True)):
        close(a, b, 2 * rounding, (what, "gradient", i))


def any_strides(x: Tensor) -> Tensor:
    """The same numbers as a view of something larger: transposed, with steps, or off the start of its memory."""
    dims = list(range(x.dim()))
    random.shuffle(dims)
    steps = [random.choice([1, 1, 2]) for _ in dims]
    memory = torch.full([steps[d] * x.size(d) + 1 for d in dims], float("nan"), dtype=x.dtype, device=x.device)
    view = memory.permute([dims.index(d) for d in range(x.dim())])
    for d in range(x.dim()):
        view = view.narrow(d, random.randint(0, 1), steps[d] * x.size(d))
        view = view[(slice(None),) * d + (slice(None, None, steps[d]),)]
    return view.copy_(x)


def close(found: Tensor, expected: Tensor, rounding: float, what: object) -> None:
    if expected.numel():
        error = (found.detach().cpu().double() - expected.detach()).abs().max().item()
        size = expected.detach().abs().max().item()
        assert error <= rounding * max(size, 1e-3), (what, error, size)


def normed_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, w: Tensor, b: Tensor, params: Sequence[list[int]]
) -> Tensor:
    channels = x.shape[1]
    convolved = F.conv2d(x, weight, bias, *params, channels)
    return F.layer_norm(convolved.movedim(1, -1), (channels,), w, b, 1e-5).movedim(-1, 1)


def max_pool(window: Sequence[object], num_dims: int) -> Callable[[Tensor], Tensor]:
    *numbers, ceil_mode = window
    lists = [number if isinstance(number, list) else [number] * num_dims for number in numbers]
    return lambda t: OPS.max_pool(t, *lists, ceil_mode, *NO_CUT)[0]
