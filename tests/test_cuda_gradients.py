"""The ops on CUDA tensors that lie anyhow in memory, their gradients that nobody wants, and their second ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from on_device import (
    DEVICE,
    DTYPES,
    NO_CUT,
    OPS,
    close,
    compare,
    max_pool,
    normed_convolution,
    random_tensor,
    runs_on_device,
)
from torch import Tensor

pytestmark = runs_on_device


def depthwise_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    channels, kernels = random.randint(1, 9), [random.choice([2, 3, 4, 5, 7, 9]) for _ in range(2)]
    dilations = [random.choice([1, 2]) for _ in range(2)]
    extents = [random.randint(d * (kernel - 1) + 1, 20) for d, kernel in zip(dilations, kernels, strict=True)]
    params = random.choice([[1, 1], [2, 2], [2, 1], [3, 4]]), [random.randint(0, 4) for _ in range(2)], dilations
    weight, bias = random_tensor(channels, 1, *kernels, dtype=dtype), random_tensor(channels, dtype=dtype)
    return (
        lambda t, w, b: OPS.convolution(t, w, b, *params, False, [0, 0], channels, *NO_CUT),
        lambda t, w, b: F.conv2d(t, w, b, *params, channels),
        [random_tensor(random.randint(1, 3), channels, *extents, dtype=dtype), weight, bias],
    )


def depthwise_layer_norm_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    channels, kernel = random.choice([7, 64, 130]), random.choice([3, 4, 7])
    params = [1, 1], [random.randint(0, 4) for _ in range(2)], [1, 1]
    x = random_tensor(2, channels, *(random.randint(kernel, 14) for _ in range(2)), dtype=dtype)
    weight = random_tensor(channels, 1, kernel, kernel, dtype=dtype)
    return (
        lambda *t: OPS.depthwise_layer_norm(*t, 1e-5, False, *params, *NO_CUT)[0],
        lambda *t: normed_convolution(*t, params),
        [x, weight, *(random_tensor(channels, dtype=dtype) for _ in range(3))],
    )


def layer_norm_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    channels = random.choice([7, 64, 130])  # few would be normed to almost nothing
    x = random_tensor(2, channels, random.randint(1, 9), random.randint(1, 9), dtype=dtype)
    return (
        lambda t, w, b: OPS.layer_norm_channels_first(t, w, b, 1e-5)[0],
        lambda t, w, b: F.layer_norm(t.movedim(1, -1), (channels,), w, b, 1e-5).movedim(-1, 1),
        [x, *(random_tensor(channels, dtype=dtype) for _ in range(2))],
    )


def norm_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    channels = 2 * random.randint(1, 20)
    x = random_tensor(random.randint(1, 3), channels, random.randint(2, 20), random.randint(2, 20), dtype=dtype)
    factors = [random_tensor(channels, dtype=torch.float32) for _ in range(2)]
    if random.random() < 0.5:
        return (
            lambda t, w, b: OPS.group_norm(t, w, b, 2, 1e-5, [])[0],
            lambda t, w, b: F.group_norm(t, 2, w, b, 1e-5),
            [x, *factors],
        )
    return (
        lambda t, w, b: OPS.batch_norm(t, w, b, None, None, True, 0.1, 1e-5, [])[0],
        lambda t, w, b: F.batch_norm(t, None, None, w, b, True, 0.1, 1e-5),
        [x, *factors],
    )


def interpolation_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    sizes, target = ([random.randint(1, 15) for _ in range(2)] for _ in range(2))
    return (
        lambda t: OPS.interpolate(t, "linear", target, [0.0, 0.0], False, *NO_CUT),
        lambda t: F.interpolate(t, target, mode="bilinear"),
        [random_tensor(2, random.randint(1, 9), *sizes, dtype=dtype)],
    )


def max_pool_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    window = (
        *(random.randint(2, 4) for _ in range(2)),
        random.randint(0, 1),
        random.randint(1, 2),
        random.random() < 0.5,
    )
    sizes = [random.randint(7, 15) for _ in range(2)]
    return (
        max_pool(window, 2),
        lambda t: F.max_pool2d(t, *window),
        [random_tensor(2, random.randint(1, 9), *sizes, dtype=dtype)],
    )


def layer_scale_case(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    sizes = [random.randint(1, 9) for _ in range(4)]
    return (
        lambda r, b, g: OPS.layer_scale(r, b, g, None),
        lambda r, b, g: r + b * g.view(-1, 1, 1),
        [*(random_tensor(*sizes, dtype=dtype) for _ in range(2)), random_tensor(sizes[1], dtype=torch.float32)],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        depthwise_case,
        depthwise_layer_norm_case,
        layer_norm_case,
        norm_case,
        interpolation_case,
        max_pool_case,
        layer_scale_case,
    ],
)
def test_tensors_that_lie_anyhow_in_memory(case, dtype):
    for turn in range(12):
        op, reference, inputs = case(dtype)
        compare(op, reference, inputs, (case.__name__, turn, [tuple(x.shape) for x in inputs]), strided=True)


def test_gradients_that_nobody_wants_are_not_made():
    x, weight, bias = torch.randn(2, 4, 8, 9), torch.randn(4, 1, 3, 3), torch.randn(4)
    numbers = torch.randn(4)
    ops = {
        "convolution": (
            lambda t, w, b: OPS.convolution(t, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 4, *NO_CUT),
            lambda t, w, b: F.conv2d(t, w, b, padding=1, groups=4),
            [x, weight, bias],
        ),
        "layer norm": (
            lambda t, w, b: OPS.layer_norm_channels_first(t, w, b, 1e-5)[0],
            lambda t, w, b: F.layer_norm(t.movedim(1, -1), (4,), w, b, 1e-5).movedim(-1, 1),
            [x, numbers, bias],
        ),
        "batch norm": (
            lambda t, w, b: OPS.batch_norm(t, w, b, None, None, True, 0.1, 1e-5, [])[0],
            lambda t, w, b: F.batch_norm(t, None, None, w, b, True, 0.1, 1e-5),
            [x, numbers, bias],
        ),
        "layer scale": (
            lambda r, b, g: OPS.layer_scale(r, b, g, None),
            lambda r, b, g: r + b * g.view(-1, 1, 1),
            [x, x + 1, numbers],
        ),
    }
    for name, (op, reference, inputs) in ops.items():
        for wanted in range(3):
            mine = [t.to(DEVICE).requires_grad_(i == wanted) for i, t in enumerate(inputs)]
            theirs = [t.double().requires_grad_(i == wanted) for i, t in enumerate(inputs)]
            expected = reference(*theirs)
            dy = torch.randn(expected.shape)
            (found,) = torch.autograd.grad(op(*mine), mine[wanted], dy.to(DEVICE))
            (grad,) = torch.autograd.grad(expected, theirs[wanted], dy.double())
            close(found, grad, 4e-5, (name, wanted))


def test_second_derivatives():
    cases = {
        "convolution": (
            lambda t, w: OPS.convolution(t, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 3, *NO_CUT),
            lambda t, w: F.conv2d(t, w, padding=1, groups=3),
            [torch.randn(2, 3, 6, 7), torch.randn(3, 1, 3, 3)],
        ),
        "layer norm": (
            lambda t, w: OPS.layer_norm_channels_first(t, w, None, 1e-5)[0],
            lambda t, w: F.layer_norm(t.movedim(1, -1), (5,), w, None, 1e-5).movedim(-1, 1),
            [torch.randn(2, 5, 3, 4), torch.randn(5)],
        ),
        "depthwise convolution and layer norm": (
            lambda t, w: OPS.depthwise_layer_norm(
                t.contiguous(memory_format=torch.channels_last),
                w,
                None,
                None,
                None,
                1e-5,
                False,
                [1, 1],
                [1, 1],
                [1, 1],
                *NO_CUT,
            )[0],
            lambda t, w: F.layer_norm(F.conv2d(t, w, padding=1, groups=5).movedim(1, -1), (5,)).movedim(-1, 1),
            [torch.randn(2, 5, 6, 7), torch.randn(5, 1, 3, 3)],
        ),
        "group norm": (
            lambda t, w: OPS.group_norm(t, w, None, 2, 1e-5, [])[0],
            lambda t, w: F.group_norm(t, 2, w, None, 1e-5),
            [torch.randn(2, 4, 3, 4), torch.randn(4)],
        ),
        "interpolation": (
            lambda t, w: OPS.interpolate(t, "linear", [7, 9], [0.0, 0.0], False, *NO_CUT) * w,
            lambda t, w: F.interpolate(t, (7, 9), mode="bilinear") * w,
            [torch.randn(2, 3, 4, 5), torch.randn(3, 1, 1)],
        ),
    }
    for name, (op, reference, inputs) in cases.items():
        dy, again = torch.randn(reference(*inputs).shape), torch.randn(inputs[0].shape)

        def second(
            op: Callable[..., Tensor], move: Callable[[Tensor], Tensor], inputs: list[Tensor] = inputs, dy: Tensor = dy,
            again: Tensor = again,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            leaves = [move(x).requires_grad_() for x in inputs]
            (dx,) = torch.autograd.grad(op(*leaves).square(), leaves[0], move(dy), create_graph=True)
            return torch.autograd.grad(dx, leaves, move(again))

        found = second(op, lambda x: x.to(DEVICE))
        expected = second(reference, lambda x: x.double())
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            close(a, b, 1e-4, (name, i))
