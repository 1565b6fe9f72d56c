"""The ops on CUDA tensors, by the kernels, against PyTorch in float64. Skipped without a GPU; FAIL_WITHOUT_CUDA=1 forbids that."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchtp  # noqa: F401

DEVICE = "cuda"
AVAILABLE = torch.cuda.is_available()

pytestmark = pytest.mark.skipif(not AVAILABLE and not os.environ.get("FAIL_WITHOUT_CUDA"), reason="needs a GPU")

OPS = torch.ops.torchtp
NO_CUT: tuple[list[int], list[int], list[str]] = ([], [], [])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
# Of the largest value: a rounding of the result, and sums in float32.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def random_tensor(*sizes: int, dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    out = torch.randn(sizes, dtype=torch.float64).to(dtype)
    return out.contiguous(memory_format=layout) if len(sizes) == 4 else out


def compare(
    op: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Sequence[Tensor], what: object = None
) -> None:
    """Outputs and the gradients of all inputs."""
    mine = [x.detach().to(DEVICE).requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = op(*mine), reference(*theirs)
    rounding = ROUNDING[inputs[0].dtype]
    assert out.dtype == inputs[0].dtype and out.shape == expected.shape, what
    close(out, expected, rounding, (what, "output"))
    if not expected.numel():
        return
    dy = random_tensor(*expected.shape, dtype=inputs[0].dtype)
    dy = dy.contiguous(memory_format=torch.channels_last) if random.random() < 0.5 and dy.dim() == 4 else dy
    found = torch.autograd.grad(out, mine, dy.to(DEVICE))
    grads = torch.autograd.grad(expected, theirs, dy.double())
    for i, (a, b) in enumerate(zip(found, grads, strict=True)):
        close(a, b, 2 * rounding, (what, "gradient", i))


def close(found: Tensor, expected: Tensor, rounding: float, what: object) -> None:
    if expected.numel():
        error = (found.detach().cpu().double() - expected.detach()).abs().max().item()
        size = expected.detach().abs().max().item()
        assert error <= rounding * max(size, 1e-3), (what, error, size)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kernel", "stride"), [(3, 1), (5, 1), (7, 1), (3, 2), (7, 2), (13, 1), (31, 1), (4, 1), (5, 2)]
)
def test_depthwise_convolution(dtype, layout, kernel, stride):
    for _ in range(4):
        channels = random.choice([1, 3, 32, 40])
        extents = [random.randint(max(1, kernel - 2 * (kernel // 2)), 90) for _ in range(2)]
        x = random_tensor(random.randint(1, 3), channels, *extents, dtype=dtype, layout=layout)
        weight, bias = random_tensor(channels, 1, kernel, kernel, dtype=dtype), random_tensor(channels, dtype=dtype)
        two = [stride] * 2, [kernel // 2] * 2, [1, 1]
        compare(
            lambda t, w, b, two=two, c=channels: OPS.convolution(t, w, b, *two, False, [0, 0], c, *NO_CUT),
            lambda t, w, b, two=two, c=channels: F.conv2d(t, w, b, *two, c),
            [x, weight, bias],
            (tuple(x.shape), layout),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [1, 8, 96, 257, 1024, 2048, 2500])
def test_layer_norm(dtype, layout, channels):
    for extents in [(8, 12), (5, 7), (1, 1), (0, 3)]:
        x = random_tensor(2, channels, *extents, dtype=dtype, layout=layout) + 1
        weight, bias = (random_tensor(channels, dtype=dtype) for _ in range(2))
        if channels == 1:
            continue  # normed to nothing
        compare(
            lambda t, w, b: OPS.layer_norm_channels_first(t, w, b, 1e-5)[0],
            lambda t, w, b, c=channels: F.layer_norm(t.movedim(1, -1), (c,), w, b, 1e-5).movedim(-1, 1),
            [x, weight, bias],
            (extents, layout),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_and_group_norm(dtype, layout):
    for channels, extents in [(4, (8, 12)), (32, (33, 70)), (130, (5, 7)), (8, (200, 300))]:
        x = random_tensor(2, channels, *extents, dtype=dtype, layout=layout) + 1
        weight, bias = (random_tensor(channels, dtype=torch.float32) for _ in range(2))
        compare(
            lambda t, w, b: OPS.batch_norm(t, w, b, None, None, True, 0.1, 1e-5, [])[0],
            lambda t, w, b: F.batch_norm(t, None, None, w, b, True, 0.1, 1e-5),
            [x, weight, bias],
            (channels, extents, layout),
        )
        compare(
            lambda t, w, b: OPS.group_norm(t, w, b, 2, 1e-5, [])[0],
            lambda t, w, b: F.group_norm(t, 2, w, b, 1e-5),
            [x, weight, bias],
            (channels, extents, layout),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("mode", "align"), [("nearest", False), ("bilinear", False), ("bilinear", True), ("bicubic", True)]
)
def test_interpolation(dtype, layout, mode, align):
    ours = {"nearest": "nearest", "bilinear": "linear", "bicubic": "cubic"}[mode]
    for sizes, target in [((6, 8), (12, 16)), ((9, 5), (4, 11)), ((3, 4), (3, 9))]:
        x = random_tensor(2, 8, *sizes, dtype=dtype, layout=layout)
        compare(
            lambda t, target=target: OPS.interpolate(t, ours, list(target), [0.0, 0.0], align, *NO_CUT),
            lambda t, target=target: F.interpolate(t, target, mode=mode, align_corners=align if "bi" in mode else None),
            [x],
            (sizes, target, layout),
        )


def test_interpolation_of_one_and_three_dims():
    for sizes, target, mode in [((9,), (20,), "linear"), ((3, 5, 4), (6, 7, 9), "trilinear")]:
        for layout in [torch.contiguous_format] + [torch.channels_last_3d] * (len(sizes) == 3):
            x = torch.randn(2, 3, *sizes).contiguous(memory_format=layout)
            compare(
                lambda t, target=target: OPS.interpolate(
                    t, "linear", list(target), [0.0] * len(target), False, *NO_CUT
                ),
                lambda t, target=target, mode=mode: F.interpolate(t, target, mode=mode),
                [x],
                (sizes, target, layout),
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_scale(dtype, layout):
    for channels, extents in [(16, (8, 12)), (5, (7, 9)), (3, (0, 4))]:
        residual, branch = (random_tensor(3, channels, *extents, dtype=dtype, layout=layout) for _ in range(2))
        keep = torch.tensor([0.0, 1.25, 1.25])
        compare(
            lambda r, b, g, keep=keep: OPS.layer_scale(r, b, g, keep.to(r.device)),
            lambda r, b, g, keep=keep: r + b * g.view(-1, 1, 1) * keep.view(-1, 1, 1, 1),
            [residual, branch, random_tensor(channels, dtype=torch.float32)],
            (channels, extents, layout),
        )
